"""Test configuration errors on shipped experiments: which mistakes raise an error, and which facts the user reads.

Each row of config_mistakes.yaml is run by `check` and as a launch. The wording of a message may change. Its facts may
not: class, exit code, the key, and the names that help to repair the mistake. Most mistakes are found before a model or
a dataset is loaded. The others need the tokenizer, for example for the length of the longest row. They are found with
the data, before the first rollout.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from realign.cli import main
from realign.config.aliases import read_own_yaml
from realign.config.files import experiments_dir
from realign.data import PreferenceData, PromptData, SupervisedData
from realign.engines import TransformersModel
from realign.engines.training.transformers_engine import TransformersEngine
from tests.tiny import save_tiny

TABLE: dict[str, Any] = read_own_yaml(Path(__file__).with_name("config_mistakes.yaml"))
ROWS: list[dict[str, Any]] = TABLE["mistakes"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with valid models and data."""
    folder = tmp_path_factory.mktemp("mistakes")
    save_tiny(folder / "m")
    save_tiny(folder / "r", head="score")
    rows = {
        "prompts": '{"prompt": "1+1=", "answer": "2"}\n' * 7 + '{"prompt": "1234+1=", "answer": "1235"}\n',
        "demonstrations": '{"prompt": "1+1=", "response": "2"}\n' * 8,
        "pairs": '{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n' * 8,
    }
    for name, text in rows.items():
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "file").write_text("no folder")
    save_tiny(folder / "run" / "final" / "actor")
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter the folder of models and data, without network and GPU."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(experiments_dir().parent)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return folder


def command_line(row: dict[str, Any]) -> list[str]:
    return [*TABLE["starts"].get(row.get("over"), []), *row["words"]]


def names_of(row: dict[str, Any]) -> str:
    return " ".join([*([row["over"]] if "over" in row else []), *row["words"]])


def contains(message: str, name: str) -> bool:
    """Return whether a message contains a name as a whole word. A number must not be part of a value."""
    before = r"[\w./=-]" if name.replace(".", "").isdigit() else r"[\w./]"
    return re.search(rf"(?<!{before}){re.escape(name)}(?:\._target_)?(?![\w/]|\.\w)", message) is not None


def check_facts(row: dict[str, Any], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Run a command line twice: as users do, and with the traceback, which shows the class of the exception."""
    facts = [row["key"], *row.get("names", [])]
    for command in (["check", "--debug"], []):
        assert main([*command, *words]) == 2
        out, err = capsys.readouterr()
        if command:
            error, message = re.split(r"^(?:realign\.errors\.)?(\w+Error): ", err, flags=re.MULTILINE)[-2:]
            assert error == row.get("error", "ConfigError")
        else:
            assert err.startswith("error: ")
            assert err.count("\n") == 1
            message = err
        assert [name for name in facts if not contains(message, name)] == []
        if "data" not in row:
            assert not out


@pytest.mark.parametrize("row", [row for row in ROWS if "data" not in row], ids=names_of)
def test_trap_g6_a_mistake_is_one_line_before_anything_is_loaded(here, capsys, monkeypatch, row):
    for loads in (TransformersModel, PromptData, SupervisedData, PreferenceData):
        monkeypatch.setattr(loads, "load", lambda *_, **__: pytest.fail("it was loaded"))
    before = sorted(os.listdir())
    check_facts(row, command_line(row), capsys)
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("row", [row for row in ROWS if "data" in row], ids=names_of)
def test_a_mistake_that_the_data_shows_is_one_line_before_the_first_rollout(here, tmp_path, capsys, monkeypatch, row):
    monkeypatch.setattr(TransformersEngine, "generate", lambda *_, **__: pytest.fail("it sampled"))
    check_facts(row, [*command_line(row), f"output_dir={tmp_path / 'run'}"], capsys)


def test_rows_that_stand_in_a_batch_several_times_are_told_of(here, tmp_path, capsys):
    with pytest.warns(UserWarning, match=r"batch_prompts=32: .*\b8 rows\b.*\b4\.0 times"):
        assert main(["check", *TABLE["starts"]["short"], f"output_dir={tmp_path / 'run'}"]) == 0
    assert re.search(r"Finished with \d+ warnings? \(see above\)", capsys.readouterr().out)


def test_the_table_is_complete():
    assert len(ROWS) >= 105
    assert all({"words", "key"} <= row.keys() for row in ROWS)
    assert all(row.get("over") in {None, *TABLE["starts"]} for row in ROWS)

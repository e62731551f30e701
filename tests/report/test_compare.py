"""Test the table of `realign compare`."""

from __future__ import annotations

import io
import json
import re
import unicodedata

import pytest
from rich.console import Console

from realign.report.compare import comparison, names, summarize_differences
from tests.report.runs import HOSTILE_VALUES, write_sweep


def shown(parts, width=160) -> str:
    console = Console(file=io.StringIO(), width=width, record=True, color_system=None)
    for part in parts:
        console.print(part)
    return console.export_text()


def test_the_table_has_metrics_and_the_settings_that_differ(run_folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for name in ("metrics.jsonl", "summary.json", "run.json"):
        (other / name).write_bytes((run_folder / name).read_bytes())
    (other / "config.yaml").write_text("seed: 2\nsame: 1\n")
    third = tmp_path / "third"
    third.mkdir()
    (third / "metrics.jsonl").write_text('{"step": 3, "seconds": 1, "reward": 5, "own": 7}\n')
    (third / "config.yaml").write_text("seed: 3\nsame: 1\n")
    text = shown(comparison([run_folder, other, third]))
    assert "completed" in text
    assert "eval/reward" in text
    assert re.search(r"^own .*\b7 ", text, re.M)  # no headline declares it
    lines = shown(comparison([run_folder, other, third])).splitlines()
    assert any(re.fullmatch(r"\d+ keys of components that only some runs have", line.strip()) for line in lines)
    assert not any(line.startswith(("same", "output_dir", "name")) for line in lines)


def test_runs_of_a_sweep_are_called_by_their_settings_with_the_mean_over_seeds(tmp_path):
    folders = write_sweep(tmp_path)
    text, narrow = (shown(comparison(folders, width), width) for width in (80, 60))
    rows, narrow_rows = ([re.split(r"  +", line.strip()) for line in one.splitlines()] for one in (text, narrow))
    assert ["std=group (n=2)", "std=batch (n=2)", "std=none (n=2)"] in rows
    assert ["folder", "0, 1", "2, 3", "4, 5"] in rows
    # 0.25 and 0.5: mean 0.375, standard error |0.25 - 0.5| / 2
    assert ["eval/reward", "0.375 ± 0.12", "0.875 ± 0.12", "1.375 ± 0.12"] in rows
    # a row per run where the columns do not fit
    assert ["std=group (n=2)", "0.375 ± 0.12"] in [row[:2] for row in narrow_rows]
    assert "interfaces.actor.adv_norm.std: group -> batch -> none" in text
    assert not re.search("output_dir|max_new_tokens|seed:", text)


@pytest.mark.parametrize(
    ("configs", "folders", "expected"),
    [
        (
            [{"a.std": "x", "b.std": "y"}, {"a.std": "z", "b.std": "w"}],
            ["r/0", "r/1"],
            ["a.std=x b.std=y", "a.std=z b.std=w"],
        ),
        (
            [{"advantage._target_": "p.GAE"}, {"advantage._target_": "p.Own"}],
            ["0", "1"],
            ["advantage=GAE", "advantage=Own"],
        ),
        ([dict.fromkeys("abcd", i) for i in range(2)], ["one", "two"], ["one", "two"]),
        ([dict.fromkeys("abcd", i) for i in range(2)], ["s/0", "s/1"], ["a=0", "a=1"]),
        ([{"a": 1}, {"b": 1}], ["0", "1"], ["0", "1"]),
        ([{"lr": 1, "seed": 1}, {"lr": 2, "seed": 2}], ["0", "1"], ["lr=1", "lr=2"]),
        ([{"resume": None, "std": 1}, {"resume": "runs/a", "std": 2}], ["a", "b"], ["std=1", "std=2"]),
    ],
)
def test_names_of_runs(configs, folders, expected):
    assert names(configs, folders) == expected


def test_texts_of_a_run_reach_neither_the_terminal_nor_markup(tmp_path):
    hostile = HOSTILE_VALUES["control characters"]
    for name in (f"one{hostile.replace('/', '')}", "two"):
        folder = tmp_path / name
        folder.mkdir()
        record = {"step": 1, "seconds": 1, hostile: 1.0, "x\x1b[2J": 2.0}
        (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        (folder / "run.json").write_text(
            json.dumps({"headline": [hostile], "attempts": [{"ended": "x", "status": hostile}]})
        )
        (folder / "config.yaml").write_text(json.dumps({hostile: f"{name[:3]} {hostile}", "list": [name[:3], hostile]}))
    stream = io.StringIO()
    console = Console(file=stream, width=400, force_terminal=True, color_system=None)
    for table in comparison(sorted(tmp_path.iterdir()), 400):
        console.print(table)
    text = stream.getvalue()
    assert text.count("[/]\\x1b]0;pwn") >= 4  # the status of both runs, the name of a metric, and a setting
    assert not {c for c in text if unicodedata.category(c) in ("Cc", "Cf")} - {"\n"}


def test_a_fork_and_its_parent_are_compared_step_by_step(tmp_path):
    folders = []
    for name, rewards in {"a": [1.0, 2.0, 3.0, 4.0], "b": [1.0, 2.0, 3.5, 4.7], "c": [0.0, 0.0, 0.0, 0.0]}.items():
        folder = tmp_path / name
        folder.mkdir()
        lines = [{"step": i + 1, "reward": reward} for i, reward in enumerate(rewards)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        parent = {"run": str(tmp_path / "a"), "step": 2} if name == "b" else None
        (folder / "run.json").write_text(json.dumps({"headline": ["reward"], "parent": parent}))
        folders.append(folder)
    said = shown(comparison(folders))
    assert "reward: 0.6 ± 0.1 in 2 steps (b minus a)" in said
    assert "minus c" not in said
    info = json.loads((tmp_path / "b/run.json").read_text())
    info["parent"] = {"run": "/gone/x", "id": "of a", "step": 2}
    (tmp_path / "b/run.json").write_text(json.dumps(info))
    assert "minus" not in shown(comparison(folders))
    (tmp_path / "a/run.json").write_text(json.dumps({"id": "of a", "headline": ["reward"]}))
    assert "reward: 0.6 ± 0.1 in 2 steps (b minus a)" in shown(comparison(folders))
    assert summarize_differences([1.0, 3.0]) == "2 ± 1"
    assert summarize_differences([float(i // 10) for i in range(100)]) == summarize_differences(
        [float(i) for i in range(10)]
    )

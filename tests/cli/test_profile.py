from __future__ import annotations

import pytest
from rich.console import Console

from realign.cli import commands as cli
from realign.cli.profile import profile_table
from realign.runtime.profiling import CallProfile, StepProfile
from tests.config_parts import write_experiment


@pytest.fixture
def bigram(tmp_path, monkeypatch):
    """Enter an empty folder and return the words of an experiment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    write_experiment(tmp_path / "conf")
    return ["--config-dir", "conf", "experiment=bigram", "output_dir=run"]


def test_the_table_lists_calls_with_seconds_fraction_tokens_and_operators():
    calls = [
        CallProfile("actor_gen", 1.5, 0.75, 1234.5, {"aten::mm": 0.5, "aten::add": 0.25}),
        CallProfile("reward_inf", 0.5, 0.25, None, {}),
    ]
    console = Console(width=160, record=True)
    console.print(profile_table(StepProfile(2, 3, 2.0, "cpu", calls)))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert lines[0] == ["Steps", "2", "to", "4:", "2", "s", "per", "step", "under", "the", "profiler"]
    assert lines[2] == ["actor_gen", "1.5", "75", "1,234", "aten::mm", "0.5,", "aten::add", "0.25"]
    assert lines[3] == ["reward_inf", "0.5", "25", "-", "-"]


def test_a_profile_writes_its_files_and_nothing_of_a_run(bigram, tmp_path, capsys):
    assert cli.main(["profile", *bigram, "profile.start=1", "profile.steps=2"]) == 0
    out = capsys.readouterr().out
    assert "Steps 1 to 2" in out
    assert "Trace: run/profile/trace.json.gz" in out
    files = {str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert files == {"profile/trace.json.gz", "profile/summary.json", "profile/files.jsonl"}


def test_a_profile_can_start_from_a_checkpoint_of_the_run(bigram, tmp_path, capsys):
    assert cli.main([*bigram, "steps=2"]) == 0
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    more = ["steps=5", "resume=auto", "resume_allow=[steps]", "profile.start=2", "profile.steps=1"]
    capsys.readouterr()
    assert cli.main(["profile", *bigram, *more]) == 0
    assert "Steps 4 to 4" in capsys.readouterr().out
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics

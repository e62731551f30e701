"""Test where `realign report` writes, and what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from realign.cli import commands as cli


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with two runs, and enter another folder."""
    for name in ("a", "b"):
        (tmp_path / "sweep" / name).mkdir(parents=True)
        (tmp_path / "sweep" / name / "metrics.jsonl").write_text('{"step": 1, "loss": 1}\n')
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "sweep"


def test_the_report_of_a_folder_of_runs_is_written_into_it(runs, capsys):
    assert cli.main(["report", "../sweep"]) == 0
    assert f"Report of 2 runs: {runs.parent}/here/../sweep/report.html (" in capsys.readouterr().out
    assert (runs / "report.html").is_file()
    assert cli.main(["report", str(runs / "a")]) == 0
    assert f"Report of 1 run: {runs}/a/report.html (" in capsys.readouterr().out
    assert list(Path.cwd().iterdir()) == []

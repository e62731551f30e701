"""Test the table of a sweep."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from realign.cli import commands as cli
from realign.cli.sweep_table import sweep_table
from tests.config_parts import write_experiment


def test_runs_are_listed_by_the_keys_that_differ_with_status_and_metric(tmp_path, monkeypatch, capsys):
    write_experiment(tmp_path / "conf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    line = ["--config-dir", "conf", "-m", "experiment=bigram", "steps=1", "interfaces.actor.epochs=1,2", "seed=3"]
    assert cli.main(line) == 0
    out = capsys.readouterr().out
    table = out[out.rindex("2 runs in runs/bigram/sweep_") :]
    rows = [[cell.strip() for cell in row.split("│")] for row in table.splitlines() if "completed" in row]
    assert [row[1:5] for row in rows] == [["0", "1", "completed", "1"], ["1", "2", "completed", "1"]]
    assert "interfaces.actor.epochs" in table
    assert "seed" not in table


def run_folder(folder: Path, override: str, status: str | None) -> Path:
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(f"- experiment=x\n- {override}\n")
    if status is not None:
        course = {"name": "eval/reward", "first": 0.1, "best": 0.5, "last": None}
        (folder / "summary.json").write_text(json.dumps({"status": status, "step": 7, "metrics": [course]}))
    return folder


def test_runs_that_failed_or_did_not_end_are_listed(tmp_path):
    folders = [
        run_folder(tmp_path / "0", "lr=1", "failed"),
        run_folder(tmp_path / "1", "lr=[x]", None),
        tmp_path / "never started",
    ]
    table = sweep_table(folders)
    assert table is not None
    out = io.StringIO()
    Console(file=out, width=120).print(table)
    rows = [[cell.strip() for cell in row.split("│")][1:-1] for row in out.getvalue().splitlines() if "│" in row]
    assert rows[0] == ["0", "1", "failed", "7", "0.1", "0.5", ""]
    assert rows[1] == ["1", "[x]", "not finished", "", "", "", ""]
    assert sweep_table([tmp_path / "never started"]) is None

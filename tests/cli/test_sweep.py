"""Test the table of a sweep."""

from __future__ import annotations

import io
import itertools
import json
import re
from pathlib import Path

from rich.console import Console

from realign.cli import commands as cli
from realign.cli.sweep import sweep_table
from tests.config_parts import write_experiment


def test_runs_are_listed_by_the_keys_that_differ_with_status_and_metric(tmp_path, monkeypatch, capsys):
    write_experiment(tmp_path / "conf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    line = ["--config-dir", "conf", "-m", "experiment=bigram", "steps=1", "interfaces.actor.epochs=1,2", "seed=3"]
    assert cli.main(line) == 0
    out = capsys.readouterr().out
    table = out[out.rindex("2 runs in runs/bigram/sweep_") :]
    rows = [line.split() for line in table.splitlines() if "completed" in line]
    assert [row[:4] for row in rows] == [["0", "epochs=1", "completed", "1"], ["1", "epochs=2", "completed", "1"]]
    assert "Settings: interfaces.actor.epochs" in table
    assert "seed" not in table


def run_folder(folder: Path, overrides: str, status: str | None, best: float = 0.5) -> Path:
    (folder / ".hydra").mkdir(parents=True)
    words = ["experiment=x", *overrides.split()]
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(words))
    if status is not None:
        course = {"name": "eval/reward", "first": 0.1, "best": best, "last": None}
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
    rows = printed(table)
    assert rows[-3:-1] == [["0", "lr=1", "failed", "7", "0.1", "0.5"], ["1", "lr=[x]", "not finished"]]
    assert sweep_table([tmp_path / "never started"]) is None


def printed(table, width=80) -> list[list[str]]:
    """Return the lines of a table at this width, as lists of cells."""
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    assert "…" not in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= width
    return [re.split(r"  +", line.strip()) for line in out.getvalue().splitlines()]


def test_runs_that_differ_only_in_the_seed_are_a_row_with_their_mean(tmp_path):
    cases = itertools.product(("group", "batch"), (0, 1))
    folders = [
        run_folder(tmp_path / str(i), f"interfaces.actor.adv_norm.std={std} seed={seed}", "completed", i / 4)
        for i, (std, seed) in enumerate(cases)
    ]
    table = sweep_table(folders)
    rows = printed(table)
    assert ["0, 1", "std=group", "completed", "7", "0.1", "0.125 ± 0.12"] in rows
    assert ["2, 3", "std=batch", "completed", "7", "0.1", "0.625 ± 0.12"] in rows
    assert ["Settings: interfaces.actor.adv_norm.std"] in rows
    seeds = printed(sweep_table(folders[:2]))
    assert [row[:3] for row in seeds[-4:-1]] == [
        ["0", "seed=0", "completed"],
        ["1", "seed=1", "completed"],
        ["0, 1", "2 seeds", "completed"],
    ]


def test_rows_of_many_settings_and_seeds_fit_80_columns(tmp_path):
    cases = itertools.product(("group", "batch"), ("1e-5", "0.0002"), range(3))
    folders = [
        run_folder(
            tmp_path / str(i),
            f"interfaces.actor.adv_norm.std={std} models.actor.optimizer.lr={lr} seed={seed}",
            "completed" if i else "failed",
            i / 7,
        )
        for i, (std, lr, seed) in enumerate(cases)
    ]
    rows = printed(sweep_table(folders))
    text = " ".join(" ".join(row) for row in rows)
    for words in ("lr=0.0002", "1 failed", "3, 4, 5", "0.5714 ± 0.082", "models.actor.optimizer.lr"):
        assert words in text

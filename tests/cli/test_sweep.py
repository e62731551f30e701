"""Test how a sweep starts its runs, and its table."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import submitit
import yaml
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


WORDS = ["--config-dir", "conf", "-m", "experiment=bigram", "steps=2", "hydra.sweep.dir=all"]


def test_a_run_that_fails_ends_the_sweep_with_its_exit_code(tmp_path, monkeypatch, capsys):
    write_experiment(tmp_path / "conf")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "all" / "1").mkdir(parents=True)
    (tmp_path / "all" / "1" / "config.yaml").touch()  # of somebody else
    assert cli.main([*WORDS, "seed=1,2,3"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("error: ") == 1
    assert captured.out.count("completed") == 1
    assert not (tmp_path / "all" / "2").exists()


@pytest.fixture
def executor(tmp_path, monkeypatch):
    """Return an executor of submitit for Slurm whose jobs run here, with its arguments."""
    (tmp_path / "srun").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    write_experiment(tmp_path / "conf")
    monkeypatch.chdir(tmp_path)
    made = SimpleNamespace(jobs=[])

    class Executor(submitit.AutoExecutor):
        def __init__(self, *arguments, **keywords):
            made.executor, made.keywords = self, keywords
            super().__init__(*arguments, **keywords)

        def submit(self, job):
            made.jobs.append(job)
            code = job()
            return SimpleNamespace(result=lambda: code, stderr=lambda: "")

    monkeypatch.setattr(submitit, "AutoExecutor", Executor)
    return made


@pytest.mark.filterwarnings("ignore:No submission happened")
def test_jobs_get_the_resources_of_the_config_and_resume_after_their_time_limit(tmp_path, executor):
    resources = ["partition=gpu", "gpus_per_node=1", "mem_gb=8", "max_num_timeout=3"]
    launcher = ["hydra/launcher=submitit_slurm", *(f"hydra.launcher.{resource}" for resource in resources)]
    assert cli.main([*WORDS, "checkpoint.every_steps=1", "seed=1,2", *launcher]) == 0
    assert executor.keywords == {"slurm_max_num_timeout": 3}
    assert executor.executor._executor.parameters == {
        "job_name": "realign",
        "time": 60,
        "partition": "gpu",
        "gpus_per_node": 1,
        "mem": "8GB",
        "signal_delay_s": 120,
    }
    job = executor.jobs[1]
    assert yaml.safe_load((tmp_path / "all" / "1" / "config.yaml").read_text())["seed"] == 2
    assert job() == 2  # an earlier run
    again = job.checkpoint().function
    assert again() == 0  # complete
    assert not (tmp_path / "all" / "1" / "final.1").exists()


def run_folder(folder: Path, overrides: str, status: str | None, best: float = 0.5) -> Path:
    (folder / ".hydra").mkdir(parents=True)
    words = ["experiment=x", *overrides.split()]
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(words))
    if status is not None:
        course = {"name": "eval/reward", "first": 0.1, "best": best, "last": None}
        (folder / "summary.json").write_text(json.dumps({"status": status, "step": 7, "metrics": [course]}))
    return folder


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

"""Test sweeps whose runs are Slurm jobs, with the local executor of the submitit launcher, and the logs of a run."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from realign.cli.train import record_launch
from realign.config.files import experiments_dir
from tests.config_parts import write_experiment

CHECKOUT = experiments_dir().parent


def sweep(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    words = ["-m", "--config-dir=conf", "experiment=bigram", "steps=1", "hydra/launcher=submitit_local", *overrides]
    command = [sys.executable, "-m", "realign", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow
def test_the_runs_of_a_sweep_are_jobs_with_folders_of_their_own(tmp_path):
    write_experiment(tmp_path / "conf")
    done = sweep(tmp_path, "interfaces.actor.epochs=1,2")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs" / "bigram").glob("sweep_*")
    configs = [yaml.safe_load((folder / str(i) / "config.yaml").read_text()) for i in range(2)]
    assert [config["interfaces"]["actor"]["epochs"] for config in configs] == [1, 2]
    assert all((folder / str(i) / "final" / "actor").is_dir() for i in range(2))
    assert len(list((folder / ".submitit").glob("*/*_log.err"))) == 2


@pytest.mark.parametrize(("verbose", "level"), [(False, logging.WARNING), (["httpx"], logging.DEBUG)])
def test_a_run_logs_no_line_for_each_request_of_its_agents_unless_asked(monkeypatch, verbose, level):
    monkeypatch.setattr("realign.cli.train.record", lambda *_: None)
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    client = logging.getLogger("httpx")
    before = client.level
    try:
        record_launch(SimpleNamespace(hydra={"verbose": verbose}), "runs/x")
        assert client.level == level
    finally:
        client.setLevel(before)

"""Test SIGTERM to all processes of a run, including those of Ray. Schedulers send it this way, like Ctrl-C in a
terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from realign.records.checkpoint.folder import list_checkpoints

ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys
from pathlib import Path

import torch

from realign.runtime import CheckpointSpec, Ray, run
from realign.cli.exit_codes import run_guarded
from tests.checkpoint_runs import experiment, save_files

torch.set_num_threads(1)
files = Path(sys.argv[1])
settings = {"steps": 10_000, "checkpoint": CheckpointSpec(), "runtime": Ray()}
made = experiment(save_files(files), files / "out", "raft", **settings)
sys.exit(run_guarded(lambda: run(made) and None, debug=False))
"""
START_S = 240
"""Maximum duration of the first steps on a busy machine, in seconds."""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="process groups are POSIX")
def test_sigterm_lets_the_step_end_writes_a_checkpoint_and_leaves_no_process(tmp_path):
    metrics, said = tmp_path / "out" / "metrics.jsonl", tmp_path / "said"
    with said.open("w") as out:
        command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
        started = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)
    try:
        deadline = time.monotonic() + START_S
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
            assert started.poll() is None, said.read_text()
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.2)
        of_the_run = psutil.Process(started.pid).children(recursive=True)
        assert any("raylet" in process.name() for process in of_the_run)
        os.killpg(started.pid, signal.SIGTERM)
        assert started.wait(60) == 143
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
    assert psutil.wait_procs(of_the_run, timeout=20)[1] == []
    steps = len(metrics.read_text().splitlines()) - 1  # minus one line from before training
    assert [c.step for c in list_checkpoints(tmp_path / "out" / "checkpoints")][-1] == steps
    assert f"stopped after step {steps} of 10000. Continue with resume=auto." in said.read_text()

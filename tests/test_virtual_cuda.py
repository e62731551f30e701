"""Run tests on the virtual CUDA device (`tests/virtual_cuda`), in processes that load it before torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.virtual_cuda.build import NO_COMPILER, compiler, library

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.virtual_cuda,
    pytest.mark.skipif(compiler() is None, reason=NO_COMPILER),
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="the virtual device needs a CPU build of torch"),
]
RUNS = "tests/virtual_cuda/test_runs.py"
QUICK = "trains_on_the_device[grpo] or full_device or model_is_on"


def on_device(*arguments: str) -> None:
    """Run pytest on the device, and fail with its output if it fails."""
    library()
    plugins = ["-p", "tests.virtual_cuda.plugin", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", *plugins, "-q", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_other_tests_and_the_processes_that_they_start_see_no_gpu():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert not torch.cuda.is_available()


def test_runs_on_the_device():
    on_device(RUNS, "-k", QUICK)


@pytest.mark.slow
def test_the_memory_of_a_rank():
    on_device("tests/virtual_cuda/test_rank_memory.py")


@pytest.mark.slow
def test_budgets_streams_and_every_other_run_on_the_device():
    files = [f"tests/virtual_cuda/test_{name}.py" for name in ("device", "budgets", "streams_and_memory")]
    on_device(*files, RUNS, "-k", f"not ({QUICK})")

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
KINDS = "instructgpt or qwen_trains or areal or trlx_ppo or step_by_step or reward_tldr"
"""Presets that differ in what is on the device: averaged weights and pretraining text, a critic alone, several samples
per prompt and proximal log-probs, a trunk with a branch, penalties, and a calibrated reward model."""
QUICK = "trains_on_the_device[grpo] or full_device or model_is_on"


def on_device(*arguments: str, fp32: bool = False) -> None:
    """Run pytest on the device, and fail with its output if it fails."""
    library()
    plugins = ["-p", "tests.virtual_cuda.plugin", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", *plugins, "-q", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | ({"VIRTUAL_CUDA_FP32": "1"} if fp32 else {})
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_other_tests_and_the_processes_that_they_start_see_no_gpu():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert not torch.cuda.is_available()


def test_the_device_and_a_run_on_it():
    on_device("tests/virtual_cuda/test_device.py", RUNS, "-k", f"test_device or {QUICK}")


@pytest.mark.slow
def test_the_memory_of_a_rank_of_every_model():
    on_device("tests/virtual_cuda/test_rank_memory.py", "-m", "not very_slow")


@pytest.mark.slow
@pytest.mark.very_slow
def test_the_memory_of_a_rank_in_all_other_cases():
    on_device("tests/virtual_cuda/test_rank_memory.py", "-m", "very_slow")


@pytest.mark.slow
def test_budgets_streams_and_every_other_run_on_the_device():
    files = [f"tests/virtual_cuda/test_{name}.py" for name in ("budgets", "streams_and_memory")]
    on_device(*files, RUNS, "-k", f"not ({QUICK})")


@pytest.mark.slow
def test_every_part_of_the_benchmark_for_gpus_runs_on_the_device():
    on_device("tests/virtual_cuda/test_gpu_benchmark.py")


@pytest.mark.slow
def test_presets_of_every_kind_on_the_device():
    on_device("tests/test_presets.py", "-m", "", "-k", KINDS, fp32=True)


@pytest.mark.slow
@pytest.mark.very_slow
def test_all_other_presets_on_the_device():
    on_device("tests/test_presets.py", "-m", "", "-k", f"not ({KINDS})", fp32=True)

"""The device of the tests in this folder, which are collected only with one of its plugins, and their small runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeAlias

import pytest

REAL = "tests.virtual_cuda.real" in sys.modules
Compose: TypeAlias = Callable[..., list[str]]
"""Returns the overrides of a run, given an experiment and more overrides."""

if REAL:
    collect_ignore = [file.name for file in Path(__file__).parent.glob("test_*.py") if file.name != "test_runs.py"]
elif "tests.virtual_cuda.plugin" not in sys.modules:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def limit() -> Callable[[int], AbstractContextManager[None]]:
    """Return what makes the device full after so many bytes."""
    if REAL:
        from tests.virtual_cuda import real as device
    else:
        from tests.virtual_cuda import device  # it refuses to be loaded after torch
    return device.limit


@pytest.fixture
def overrides(task, tmp_path) -> Compose:
    """Return the overrides of a small run whose rewards differ between untrained answers."""
    reward = tmp_path / "reward.py"
    reward.write_text("def score(prompt, response, row):\n    return len(response) / 5 + (response[:1] in '13579')\n")

    def make(experiment: str, *more: str) -> list[str]:
        prompts = [f"data.path={task.prompts}", f"evaluation.data.path={task.held_out}", "evaluation.batch_prompts=8"]
        rewards = [f"interfaces.reward.function={reward}:score", "interfaces.reward.workers=0"]
        sizes = ["steps=2", "batch_prompts=4", f"output_dir={tmp_path / 'run'}"]
        return [experiment, f"models.actor.path={task.model}", *prompts, *rewards, *sizes, *more]

    return make

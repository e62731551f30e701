"""Test that a killed and resumed run computes the same as an uninterrupted one: N steps are k, a kill, and N - k."""

from __future__ import annotations

import pytest

from realign.records.checkpoint.folder import list_checkpoints
from realign.runtime import run
from tests.checkpoint_runs import RUNS, assert_same_run, experiment, killed, run_until_killed, start_anywhere, started

QUICK = ("ppo", "rft", "curriculum with dynamic sampling")
"""Runs with every kind of state: random numbers, models, moments, pools, and the order of the data."""


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in RUNS])
def test_trap_g2_a_killed_run_goes_on_bit_for_bit(files, tmp_path, name):
    """Kill the run once in the middle of an epoch, and again at the end of one."""
    started(files, tmp_path / "whole", name)
    killed(files, tmp_path / "parts", name, after=1)
    start_anywhere()
    run_until_killed(experiment(files, tmp_path / "parts", name, resume="auto"), 4)
    assert [c.step for c in list_checkpoints(tmp_path / "parts" / "checkpoints")][-3:] == [1, 2, 3]
    start_anywhere()
    run(experiment(files, tmp_path / "parts", name, resume="auto"))
    assert_same_run(tmp_path / "parts", tmp_path / "whole")

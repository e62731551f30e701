from __future__ import annotations

import json
import sys
import time

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.jobs import Job, Launch, command_of, descendants, kill

PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"


def job(folder, rows=(), weights=None):
    (folder / "final" / "actor").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9, "cut')
    if weights is not None:
        save_file(weights, folder / "final" / "actor" / "model.safetensors")
    return Job(folder, [])


def test_records_are_the_complete_lines_of_the_steps(tmp_path):
    found = job(tmp_path / "a", [{"step": 0, "x": 7.0}, {"step": 1, "x": 1.0}, {"step": 2}, {"step": 3, "x": 2.0}])
    assert found.steps() == 3
    assert found.series("x") == [1.0, 2.0]
    assert Job(tmp_path / "none", []).steps() == 0


def test_the_largest_difference_of_two_runs_is_zero_only_for_equal_bits(tmp_path):
    one = job(tmp_path / "a", weights={"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([0.5])})
    two = job(tmp_path / "b", weights={"w": torch.tensor([1.0, 2.25]), "b": torch.tensor([0.5])})
    assert one.largest_difference(one) == 0
    assert one.largest_difference(two) == 0.25
    with pytest.raises(RuntimeError, match="a and c have different weights"):
        one.largest_difference(job(tmp_path / "c", weights={"w": torch.tensor([1.0])}))


def test_what_a_process_started_is_found_and_killed(tmp_path):
    """The descendants include the child of a child. When that child is dead, the parent ends."""
    with Launch(Job(tmp_path / "run", [], (sys.executable, "-c", PARENT))) as launch:
        launch.wait_until(lambda: len([*descendants(launch.process.pid)]) == 1, "a child")
        (child,) = descendants(launch.process.pid)
        launch.wait_until(lambda: "time.sleep" in command_of(child), "its command")
        kill(child)
        assert launch.process.wait(20) == 0
    kill(child)  # killing a dead process has no effect
    assert not [*descendants(launch.process.pid)]


def test_a_process_that_ends_too_early_is_told_with_what_it_said(tmp_path):
    with (
        Launch(Job(tmp_path / "run", [], (sys.executable, "-c", "print('some words'); raise SystemExit(3)"))) as launch,
        pytest.raises(RuntimeError, match=r"run ended before the first step:\nsome words"),
    ):
        launch.wait_until(lambda: False, "the first step")
    with (
        Launch(Job(tmp_path / "other", [], (sys.executable, "-c", "raise SystemExit(3)"))) as launch,
        pytest.raises(RuntimeError, match="ended with 3"),
    ):
        launch.finish()


def test_nothing_is_left_behind_when_the_watcher_leaves(tmp_path):
    with Launch(Job(tmp_path / "run", [], (sys.executable, "-c", PARENT))) as launch:
        launch.wait_until(lambda: len([*descendants(launch.process.pid)]) == 1, "a child")
        (child,) = descendants(launch.process.pid)
    deadline = time.time() + 60
    while command_of(child) and time.time() < deadline:  # the process that adopted the child must collect its exit code
        time.sleep(0.01)
    assert not command_of(child)

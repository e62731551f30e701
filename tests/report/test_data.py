"""Test the data of a report: limits, averages, and the status of a run."""

from __future__ import annotations

import json
import os
import socket

import pytest

from realign.report.data import run_data, run_line, status
from realign.report.files import run_info, summary
from tests.report.runs import HOSTILE_VALUES, hostile_files


def test_a_report_contains_the_records_of_the_run(run_folder):
    data = run_data(run_folder)
    assert data["status"]["state"] == "completed"
    assert data["metrics"]["step"] == [0, 1, 2, 3, 4]
    assert {step for one in data["tokens"] if (step := one["step"])} == {1, 2, 4}
    assert {"actor_gen", "actor_train", "reward_inf", "ref_inf", "step", "evaluation"} <= {
        s["name"] for s in data["spans"]
    }
    assert data["graph"].startswith("<svg")
    assert data["samples"]
    assert data["eval_samples"]
    assert "graph" not in data["info"]


@pytest.mark.parametrize("kind", HOSTILE_VALUES)
def test_a_value_of_a_wrong_type_is_left_out_wherever_it_is(kind, run_folder, tmp_path):
    files = hostile_files(run_folder, HOSTILE_VALUES[kind])
    for name, content in files.items():
        (tmp_path / name).write_text(content if name.endswith(".jsonl") else content.splitlines()[1])
    json.dumps(run_data(tmp_path), allow_nan=False)
    (tmp_path / "metrics.jsonl").unlink()
    for name in ("run.json", "summary.json"):
        for line in files[name].splitlines()[1:]:
            (tmp_path / name).write_text(line)
            json.dumps(run_line(tmp_path, "key"), allow_nan=False)


@pytest.mark.parametrize(
    ("attempt", "state"),
    [
        ({"ended": "2026", "status": "failed", "reason": "disk"}, "failed"),
        ({"ended": None, "host": socket.gethostname(), "pid": os.getpid()}, "running"),
        ({"ended": None, "host": socket.gethostname(), "pid": 2**22 + 1}, "killed"),
        ({"ended": None, "host": socket.gethostname(), "pid": 2**80}, "killed"),
        ({"ended": None, "host": socket.gethostname(), "pid": -1}, "killed"),
        ({"ended": None, "host": "elsewhere", "pid": 1}, "killed"),
    ],
)
def test_the_status_is_that_of_the_last_attempt(tmp_path, attempt, state):
    attempts = [{"ended": "x", "status": "completed"}, attempt]
    (tmp_path / "run.json").write_text(json.dumps({"attempts": attempts}))
    assert status(tmp_path, run_info(tmp_path), summary(tmp_path))["state"] == state

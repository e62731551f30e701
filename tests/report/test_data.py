"""Test the data of a report: limits, averages, and the status of a run."""

from __future__ import annotations

import json
import os
import socket

import pytest

from realign.report.data import BUDGETS, POINTS, columns, run_data, run_line, spread, status


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


def test_a_folder_with_nothing_but_metrics_is_shown(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "seconds": 0.5, "loss": 2}\n')
    data = run_data(tmp_path, "mine")
    assert data["key"] == "mine"
    assert data["metrics"]["values"] == {"loss": [2.0]}
    assert data["status"]["state"] == "unknown"
    assert run_line(tmp_path, "mine")["metric"] == "loss"


def test_long_runs_are_averaged_over_neighboring_steps():
    records = [{"step": i, "seconds": i, "x": float(i), "rare": 1.0 if i == 7 else None} for i in range(3 * POINTS)]
    found = columns(records)
    assert found["averaged"] == 3
    assert len(found["step"]) == POINTS
    assert found["step"][:2] == [2, 5]
    assert found["values"]["x"][:2] == [1, 4]
    assert found["values"]["rare"][:3] == [None, None, 1.0]


def test_the_kept_steps_fit_the_budget_and_include_the_first_and_the_last():
    records = [{"step": step, "text": "x" * 100, "response": i} for step in range(200) for i in range(4)]
    kept = spread(records, 20_000)
    steps = list(dict.fromkeys(one["step"] for one in kept))
    assert sum(len(json.dumps(one)) for one in kept) <= 20_000
    assert (steps[0], steps[-1]) == (0, 199)
    assert all(sum(one["step"] == step for one in kept) == 4 for step in steps)
    assert spread(records[:4], 10) == []
    assert spread([], BUDGETS["tokens"]) == []


@pytest.mark.parametrize(
    ("attempt", "state"),
    [
        ({"ended": "2026", "status": "failed", "reason": "disk"}, "failed"),
        ({"ended": None, "host": socket.gethostname(), "pid": os.getpid()}, "running"),
        ({"ended": None, "host": socket.gethostname(), "pid": 2**22 + 1}, "killed"),
        ({"ended": None, "host": "elsewhere", "pid": 1}, "killed"),
    ],
)
def test_the_status_is_that_of_the_last_attempt(tmp_path, attempt, state):
    assert status(tmp_path, {"attempts": [{"ended": "x", "status": "completed"}, attempt]}, {})["state"] == state

"""Test the summary at the end of a run."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from realign.api.callback import EndStatus
from realign.records.metrics.shown_metrics import MetricSummary, metric_summaries
from realign.runtime.run_report import RunSummary

HISTORY = [
    {"step": 0, "eval/reward": 0.1, "eval/nll": 3.0, "eval/missing_rewards": 0.0},
    {"step": 1, "reward": 0.2, "grad_norm": 1.0},
    {"step": 2, "reward": 0.1, "grad_norm": 1.0, "eval/reward": 0.5, "eval/nll": 2.0, "eval/length": 4.0},
    {"step": 3, "reward": 0.3, "grad_norm": 1.0, "eval/reward": 0.4, "eval/nll": math.nan, "eval/length": 5.0},
]
SUMMARY = RunSummary(
    "toy", EndStatus.stopped, "callbacks.stop: [enough]", 3, 9, 72.0,
    metric_summaries(HISTORY, ("reward", "grad_norm")), 2,
    {"models": "runs/größe/final", "log": "runs/größe/realign.log"}, {"chat with the model": "realign chat x"},
)  # fmt: skip


def test_evaluations_come_first_with_their_best_value_and_general_metrics_are_left_out():
    summaries = metric_summaries(HISTORY, ("reward", "eval/reward", "grad_norm"))
    assert [one.name for one in summaries] == ["eval/reward", "eval/nll", "eval/length", "reward"]
    assert summaries[0] == MetricSummary("eval/reward", 0.1, 0, 0.4, 3, 0.5, 2)
    assert (summaries[1].best, summaries[1].best_step) == (2.0, 2)
    assert summaries[2].best is None  # it is unknown which lengths are better
    assert summaries[3].best is None  # a single training batch is noisy


def test_save_best_decides_the_direction():
    by_name = {one.name: one for one in metric_summaries(HISTORY, (), {"eval/length": False, "eval/reward": False})}
    assert (by_name["eval/length"].best, by_name["eval/reward"].best) == (4.0, 0.1)


def test_the_panel_has_the_facts_and_markup_in_names_is_harmless():
    out = io.StringIO()
    SUMMARY.show(Console(file=out, width=100))
    text = out.getvalue()
    assert "toy: stopped after 3 of 9 steps in 1 min 12 s " in text
    for part in (
        "callbacks.stop: [enough]",
        "0.5 (step 2)",
        "runs/größe/final",
        "2, see runs/größe/realign.log",
        "realign chat x",
    ):
        assert part in text, part
    assert SUMMARY.text().splitlines()[1:-1] != []


def test_a_command_is_on_one_line_however_narrow_the_terminal_is():
    command = f"realign chat {'long/' * 30}actor"
    out = io.StringIO()
    replace(SUMMARY, next_commands={"chat": command}).show(Console(file=out, width=40))
    assert f"chat  {command}\n" in out.getvalue()


def test_the_file_is_json_without_nan(tmp_path):
    SUMMARY.write(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert (summary["status"], summary["step"]) == ("stopped", 3)
    assert summary["metrics"][1]["last"] is None

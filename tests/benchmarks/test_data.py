from __future__ import annotations

import json

import pytest

from benchmarks import data


@pytest.mark.slow
def test_the_benchmark_checks_every_operation_and_ends_with_json(capsys, monkeypatch):
    monkeypatch.setattr(data, "BUDGET", 2048)  # so that few sequences already form several micro-batches
    data.main(["sizes=64", "repeats=1"])
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    assert [row["operation"] for row in report["rows"]] == [
        "gather",
        "take",
        "minibatches",
        "merge",
        "plan",
        "plan, split",
        "restore",
        "GAE",
        "normalise by group",
        "keep the best 2",
    ]
    assert all(row["sequences"] == 64 and row["ratio"] > 0 for row in report["rows"])
    assert len(lines) == 2 + len(report["rows"])

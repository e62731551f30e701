from __future__ import annotations

import json

import pytest

from benchmarks.peer.__main__ import summary, table
from benchmarks.peer.work import SCENARIOS

SCENARIO = SCENARIOS["tiny"]


def turn(wall: float, rollout: float, lengths: list[int], **more: float) -> dict[str, object]:
    memory = {"peak_mib": 300.0, "loaded_mib": 200.0}
    times = {"wall": wall, "rollout": rollout, "training": wall - rollout}
    return {**times, "lengths": lengths, "prompt_tokens": [5, 6], **memory, **more}


def test_summary_by_hand():
    ours = [turn(1.0, 0.25, [1, 2, 3, 4], model_work=0.9), turn(3.0, 1.25, [2, 2, 2, 2], model_work=2.4)]
    theirs = [turn(4.0, 2.0, [1, 2, 3, 4]), turn(6.0, 3.0, [2, 2, 2, 2])]
    flops = [sum(SCENARIO.flops([5, 6], lengths).values()) for lengths in ([1, 2, 3, 4], [2, 2, 2, 2])]
    found = summary(SCENARIO, {"realign": ours, "trl": theirs}, peak=1e6, tried={"8": 1.0})
    assert found["seconds"]["realign"] == {"wall": 2.0, "rollout": 0.75, "training": 1.25}
    assert found["ratio"] == {"wall": 2.5, "rollout": pytest.approx(3.33), "training": 2.0}
    assert found["ratio_range"] == [2.0, 4.0]
    assert found["overhead"] == pytest.approx(0.15)
    assert found["step_mib"] == {"realign": 100, "trl": 100}
    assert found["utilisation"]["trl"] == pytest.approx((flops[0] / 4 + flops[1] / 6) / 2 / 1e6, abs=1e-3)
    assert "tiny" in table([found])
    json.dumps(found, allow_nan=False)


def test_sides_that_did_different_work_are_not_compared():
    ours, theirs = turn(1.0, 0.5, [1, 2, 3, 4], model_work=0.9), turn(1.0, 0.5, [1, 2, 3, 5])
    with pytest.raises(AssertionError, match="different work"):
        summary(SCENARIO, {"realign": [ours], "trl": [theirs]}, peak=1.0, tried={})

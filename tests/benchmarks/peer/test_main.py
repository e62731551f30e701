from __future__ import annotations

import json

import pytest

import benchmarks.peer.__main__ as peer
from benchmarks.peer.__main__ import fastest_trl, main, summary, table
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
    found = summary(SCENARIO, {"realign": ours, "trl": theirs}, peak=1e6, tried={(2, 8): 1.0, (1, 8): 0.5})
    assert found["seconds"]["realign"] == {"wall": 2.0, "rollout": 0.75, "training": 1.25}
    assert found["ratio"] == {"wall": 2.5, "rollout": pytest.approx(3.33), "training": 2.0}
    assert found["ratio_range"] == [2.0, 4.0]
    assert found["overhead"] == pytest.approx(0.15)
    assert found["step_mib"] == {"realign": 100, "trl": 100}
    assert found["utilisation"]["trl"] == pytest.approx((flops[0] / 4 + flops[1] / 6) / 2 / 1e6, abs=1e-3)
    assert found["trl"] == {"threads": 1, "micro_batch": 8}
    assert "tiny" in table([found])
    assert "1, 8" in table([found])
    json.dumps(found, allow_nan=False)


def test_sides_that_did_different_work_are_not_compared():
    ours, theirs = turn(1.0, 0.5, [1, 2, 3, 4], model_work=0.9), turn(1.0, 0.5, [1, 2, 3, 5])
    with pytest.raises(AssertionError, match="different work"):
        summary(SCENARIO, {"realign": [ours], "trl": [theirs]}, peak=1.0, tried={(1, 1): 1.0})


def test_the_fastest_micro_batch_of_trl_is_also_tried_with_fewer_threads(monkeypatch, tmp_path):
    seconds = {(2, 1): 3.0, (2, 2): 2.0, (2, 4): 5.0, (1, 2): 1.0}

    class Recorded:
        def __init__(self, side, scenario, folder, steps, threads, *, per_device_train_batch_size, device):
            self.choice = threads, per_device_train_batch_size

        def step(self, number):
            return {"wall": seconds[self.choice] if number == 2 else 0.0}

        def close(self):
            pass

    monkeypatch.setattr(peer, "Worker", Recorded)
    assert fastest_trl(SCENARIO, tmp_path, [2, 1], "cpu", (1, 2, 3, 4, 8)) == seconds


def test_only_the_requested_parts_run(monkeypatch, capsys):
    monkeypatch.setattr(peer, "measurements", lambda *_: pytest.fail("parts=rollouts measures no steps"))
    sides = {"sampler": [{"cpu": 1.0, "wall": 1.0, "lengths": [2], "greedy": [3]}] * 2}
    monkeypatch.setattr(peer.rollouts, "compare", lambda scenario, steps: peer.rollouts.summary(scenario, sides, {}))
    main(["parts=rollouts", "scenarios=tiny"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["scenarios"] == []
    assert [row["scenario"] for row in report["rollouts"]] == ["tiny"]


@pytest.mark.parametrize("word", ["parts=speed", "scenarios=speed"])
def test_an_unknown_part_or_scenario_ends_the_program(word):
    with pytest.raises(SystemExit, match="'speed'; valid"):
        main([word])

from __future__ import annotations

import json

import pytest

from benchmarks.peer import rollouts
from benchmarks.peer.rollouts import summary, table
from benchmarks.peer.work import SCENARIOS

SCENARIO = SCENARIOS["tiny"]


def turn(cpu: float, lengths: list[int] | None = None, greedy: list[int] | None = None) -> dict[str, object]:
    return {"cpu": cpu, "wall": 2 * cpu, "lengths": lengths or [2, 3], "greedy": greedy or [7, 8]}


def test_ratios_are_medians_over_the_rollouts_after_the_first():
    ours, theirs = [turn(99.0), turn(1.0), turn(2.0), turn(4.0)], [turn(1.0), turn(3.0), turn(4.0), turn(4.0)]
    found = summary(SCENARIO, {"sampler": ours, "vllm": theirs}, {"llama": "not installed (pip install x)"})
    assert found["seconds"] == {"sampler": {"wall": 4.0, "cpu": 2.0}, "vllm": {"wall": 8.0, "cpu": 4.0}}
    assert found["ratio"]["vllm"] == {"wall": 2.0, "cpu": 2.0}
    assert found["ratio_range"]["vllm"] == [1.0, 3.0]
    assert found["tokens"] == 5
    json.dumps(found, allow_nan=False)


def test_the_table_names_what_to_install_for_a_missing_side():
    row = summary(SCENARIO, {"sampler": [turn(1.0)] * 2}, {"llama": "not installed (pip install x)"})
    lines = table([row | {"not_installed": {"llama": "not installed (pip install x)", "vllm": "not installed (y)"}}])
    assert lines.splitlines()[1].count("not installed") == 2
    assert lines.splitlines()[2:] == ["llama.cpp: not installed (pip install x)", "vLLM: not installed (y)"]


@pytest.mark.parametrize("other", [turn(1.0, lengths=[2, 4]), turn(1.0, greedy=[7, 9])])
def test_sides_with_other_lengths_or_weights_are_not_compared(other):
    with pytest.raises(AssertionError, match="vllm: other"):
        summary(SCENARIO, {"sampler": [turn(1.0)] * 2, "vllm": [other] * 2}, {})


def test_only_installed_sides_run_and_they_take_turns(monkeypatch):
    calls = []

    class Recorded:
        def __init__(self, side, scenario, folder, steps, threads):
            assert (steps, threads) == (3, 1)
            assert (folder / "model").is_dir()
            self.side = side

        def step(self, number):
            calls.append((number, self.side))
            return turn(1.0)

        def close(self):
            calls.append(("closed", self.side))

    monkeypatch.setattr(rollouts, "Worker", Recorded)
    monkeypatch.setattr(rollouts, "missing", lambda side: "not installed (z)" if side == "vllm" else None)
    found = rollouts.compare(SCENARIO, 2)
    assert found["not_installed"] == {"vllm": "not installed (z)"}
    steps = [(1, "sampler"), (1, "llama"), (2, "llama"), (2, "sampler"), (3, "sampler"), (3, "llama")]
    assert calls == [*steps, ("closed", "sampler"), ("closed", "llama")]

from __future__ import annotations

from benchmarks.peer.process import turns


class Recorded:
    """A side that only records its steps."""

    def __init__(self, name, steps):
        self.name, self.steps = name, steps

    def step(self, number):
        self.steps.append((self.name, number))
        return {"number": number}

    def close(self):
        self.steps.append((self.name, "closed"))


def test_sides_alternate_and_the_step_after_a_pause_is_not_measured():
    steps = []
    sides = {name: Recorded(name, steps) for name in "ab"}
    measured = list(turns(sides, 2))
    worked = [("a", 1), ("a", 2), ("b", 1), ("b", 2), ("b", 3), ("b", 4), ("a", 3), ("a", 4)]
    assert steps == [*worked, ("a", "closed"), ("b", "closed")]
    assert measured == [{name: {"number": number} for name in "ab"} for number in (2, 4)]

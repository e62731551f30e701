from __future__ import annotations

import json
from pathlib import Path

import pytest

from realign.demo.sentiment import openings, prepare
from realign.rewards.sentiment import compound


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    sizes = {"demonstrations": 400, "pairs": 200, "held_out_pairs": 100, "held_out": 32}
    return prepare(tmp_path_factory.mktemp("task"), seed=0, **sizes)


def share_right(path: Path) -> float:
    """Return the fraction of pairs whose label agrees with VADER."""
    differences = [
        compound(r["prompt"], r["chosen"], {}) - compound(r["prompt"], r["rejected"], {}) for r in rows(path)
    ]
    assert 0 not in differences
    return sum(difference > 0 for difference in differences) / len(differences)


def test_nothing_trains_on_what_is_held_out(task):
    held_out = {r["prompt"] for r in rows(task.held_out)}
    assert {r["prompt"] for r in rows(task.held_out_pairs)} <= held_out
    trained = {r["prompt"] for path in (task.prompts, task.demonstrations, task.pairs) for r in rows(path)}
    assert not held_out & trained
    assert len(held_out) + len(rows(task.prompts)) == len(openings())


def test_labels_that_are_wrong_prefer_the_longer_response(task):
    assert share_right(task.held_out_pairs) == 1
    assert 0.75 <= share_right(task.pairs) < 1
    for row in rows(task.pairs):
        chosen, rejected = row["chosen"], row["rejected"]
        if compound(row["prompt"], chosen, {}) < compound(row["prompt"], rejected, {}):
            assert len(chosen.split()) > len(rejected.split())


def test_the_control_deals_labels_out_at_random(tmp_path):
    sizes = {"demonstrations": 5, "pairs": 400, "held_out_pairs": 40}
    control = prepare(tmp_path, seed=0, shuffle=True, **sizes)
    assert 0.4 < share_right(control.pairs) < 0.6
    assert share_right(control.held_out_pairs) == 1

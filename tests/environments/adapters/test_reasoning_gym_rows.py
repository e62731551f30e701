"""Rows of reasoning-gym, with the package (slow)."""

from __future__ import annotations

import json

import pytest

from realign.environments.adapters.reasoning_gym_rows import main, rows
from realign.rewards.reasoning import verified

pytestmark = pytest.mark.slow
pytest.importorskip("reasoning_gym", reason="needs the extra tasks")


@pytest.mark.parametrize("task", ["chain_sum", "leg_counting", "letter_counting", "number_sorting"])
def test_the_verifier_accepts_the_answer_of_a_written_row_and_no_other(task, tmp_path):
    path = tmp_path / "rows.jsonl"
    main([str(path), f"task={task}", "size=3", "seed=5"])
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["task"] for row in written] == [task] * 3
    assert [row["prompt"] for row in written] == [row["prompt"] for row in rows(task, size=3, seed=5)]
    for row in written:
        assert verified(row["prompt"], row["answer"], row) == 1.0
        assert verified(row["prompt"], "nothing", row) < 1.0

from __future__ import annotations

import json

import pytest

from realign.demo.gold import agreement, compare, judged
from realign.errors import DataError


def sample(step: int, prompt: int, learned: float | None, gold: float) -> dict[str, object]:
    return {"step": step, "id": prompt, "prompt": "p", "response": str(gold), "reward": learned, "gold": gold}


def test_both_rewards_are_in_deviations_of_the_first_step():
    first = [sample(1, 0, 1.0, 0.0), sample(1, 0, 3.0, 0.5)]  # learned 2 +- 1, gold 0.25 +- 0.25
    second = [sample(2, 0, 4.0, 0.5), sample(2, 0, 6.0, 0.75)]  # learned 5, gold 0.625
    before, after = compare([first, second])
    assert before == {"step": 1, "learned": 0.0, "gold": 0.0, "gap": 0.0, "own_accuracy": 1.0}
    assert after == pytest.approx({"step": 2, "learned": 3.0, "gold": 1.5, "gap": 1.5, "own_accuracy": 1.0})


def test_agreement_counts_pairs_within_prompts_whose_gold_differs():
    # one agreeing pair, one disagreeing pair, and one pair with equal gold rewards
    one = [sample(1, 0, 1.0, 0.0), sample(1, 0, 2.0, 0.5), sample(1, 0, 0.0, 0.5)]
    other = [sample(1, 1, 5.0, 0.1), sample(1, 1, 5.0, 0.2)]  # equal learned rewards do not count as agreement
    assert agreement(one + other) == pytest.approx(1 / 3)
    assert agreement([sample(1, 0, 1.0, 0.0), sample(1, 1, 2.0, 0.5)]) is None


def test_the_file_is_read_step_by_step_and_judged(tmp_path):
    path = tmp_path / "samples.jsonl"
    rows = [sample(step, 0, reward, 0.5) for step, reward in ((1, 1.0), (1, None), (2, 2.0))]
    path.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "gold"}) + "\n" for row in rows))
    steps = judged(path, lambda prompt, response, row: float(response) + row["step"])
    assert [[s["gold"] for s in step] for step in steps] == [[1.5], [2.5]]
    with pytest.raises(DataError, match="no response with both a learned and a gold reward"):
        judged(path, lambda prompt, response, row: None)

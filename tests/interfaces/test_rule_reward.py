from __future__ import annotations

import math
import multiprocessing
from typing import Any

import pytest
import torch

from realign.api import MicroBatchSpec, Model, SequenceSample
from realign.interfaces.rule_reward import RuleRewardInterface, texts
from realign.rewards.processes import RewardError

LETTERS = "?abcdefgh"


class Letters:
    """A tokenizer of letters; 0 is a special token."""

    def batch_decode(self, sequences: list[list[int]], skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return ["".join(LETTERS[i] for i in ids if i) for ids in sequences]


MODEL = Model("reward", None, Letters(), seed=3)


@pytest.fixture
def function(tmp_path) -> str:
    """Reward: the length of the response times the row's price; none for "e", an exception for "h"."""
    path = tmp_path / "priced.py"
    path.write_text(
        "def score(prompt, response, row):\n"
        "    if response == 'e':\n"
        "        return None\n"
        "    if response == 'h':\n"
        "        raise ValueError('h')\n"
        "    return len(response) * row['price'] + (prompt == 'b') / 2\n"
    )
    return f"{path}:score"


def batch(*groups: list[list[int]], prompt: int = 1) -> SequenceSample:
    """Each response after a prompt of one token, 1 for the first group, 2 for the second, ..."""
    ids = [[[prompt + g, *response] for response in group] for g, group in enumerate(groups)]
    data = SequenceSample.from_sequences([f"p{g}" for g in range(len(groups))], {"input_ids": ids})
    starts = data.cu_seqlens()[:-1].long()
    mask = torch.zeros(len(data["input_ids"]), dtype=torch.bool)
    mask[starts] = True
    rows: list[dict[str, Any]] = [{"price": 10**g} for g in range(len(groups))]
    return data.with_tokens(prompt_mask=mask).with_metadata(row=rows)


def rewards(interface: RuleRewardInterface, data: SequenceSample) -> list[float | None]:
    out = interface.inference(MODEL, data, MicroBatchSpec())
    assert out.keys == {"rewards"}
    assert out["rewards"].dtype == torch.float32
    return [None if math.isnan(r) else r for r in out["rewards"].tolist()]


def test_prompt_and_response_are_told_apart_without_special_tokens():
    data = batch([[3, 4, 0], []], [[5]])
    assert texts(MODEL, data) == (["a", "a", "b"], ["cd", "", "e"])


@pytest.mark.parametrize("workers", [0, 1])
def test_every_response_is_judged_with_the_row_of_its_prompt(function, workers):
    interface = RuleRewardInterface(function, workers=workers)
    try:
        assert rewards(interface, batch([[3, 4, 0], [], [5]], [[6], [7, 7]])) == [2, 0, None, 10.5, 20.5]
    finally:
        interface.close()


def test_trap_c12_a_failure_is_a_missing_reward_and_too_many_stop_the_run(function):
    interface = RuleRewardInterface(function, workers=0, max_failed_fraction=0.5)
    assert rewards(interface, batch([[8], [3]])) == [None, 1]
    with pytest.raises(RewardError, match=r"max_failed_fraction=0\.5"):
        rewards(interface, batch([[8], [8], [3]]))


def test_shuffled_rewards_are_the_same_numbers_for_other_responses_again_and_again(function):
    data = batch([[3] * n for n in range(1, 9)], [[3] * n for n in range(1, 9)])
    plain = rewards(RuleRewardInterface(function, workers=0), data)
    shuffled = rewards(RuleRewardInterface(function, workers=0, shuffle=True), data)
    assert shuffled != plain
    assert sorted(shuffled) == sorted(plain)
    assert any((a < 9) != (b < 9) for a, b in zip(plain, shuffled, strict=True))  # across groups too
    assert rewards(RuleRewardInterface(function, workers=0, shuffle=True), data) == shuffled


def test_a_wrong_function_or_setting_is_named_when_the_interface_opens(function):
    with pytest.raises(ValueError, match="absent"):
        RuleRewardInterface(function.replace(":score", ":absent")).open()
    with pytest.raises(ValueError, match="workers must be at least 0"):
        RuleRewardInterface(function, workers=-1).open()


def test_closing_stops_the_workers_and_can_be_repeated(function):
    interface = RuleRewardInterface(function, workers=1)
    interface.close()
    assert rewards(interface, batch([[3]])) == [1]
    assert multiprocessing.active_children()
    interface.close()
    interface.close()
    assert not multiprocessing.active_children()

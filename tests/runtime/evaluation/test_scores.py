"""Standard errors of evaluations, and the values behind their metrics."""

from __future__ import annotations

import math

import pytest
import torch

from realign.api import SequenceSample
from realign.runtime.evaluation.scores import Scored, StandardErrors, merge_scored

NAN = math.nan


def batch(rewards: list[list[float]]) -> SequenceSample:
    ids = [f"p{i}" for i in range(len(rewards))]
    made = SequenceSample.from_sequences(ids, {"input_ids": [[[1, 2]] * len(group) for group in rewards]})
    tokens = [True, False] * sum(map(len, rewards))
    return made.with_tokens(prompt_mask=torch.tensor(tokens)).with_sequences(
        rewards=torch.tensor([reward for group in rewards for reward in group])
    )


def errors(*batches: Scored) -> dict[str, float]:
    scores = StandardErrors()
    for one in batches:
        scores.add(one)
    return scores.values()


def test_the_error_is_that_of_the_mean_of_prompt_means():
    parts = [Scored(batch([[1.0, 0.0], [1.0, 1.0]])), Scored(batch([[0.0, 0.0]]))]
    means = torch.tensor([0.5, 1.0, 0.0])
    assert errors(*parts)["eval/reward"] == pytest.approx(float(means.std() / math.sqrt(3)))
    assert merge_scored(parts)[0]["eval/reward"] == 0.5


def test_groups_of_unequal_size_are_weighted_by_their_responses():
    error = errors(Scored(batch([[1.0, 1.0, 1.0], [0.0, NAN]])))["eval/reward"]
    # mean 3/4; residual sums 3 - 9/4 and 0 - 3/4
    assert error == pytest.approx(math.sqrt(2 * (0.75**2 + 0.75**2)) / 4)


def test_correlated_responses_do_not_lower_the_error():
    """With equal responses to a prompt, more of them add no information."""
    once, often = (errors(Scored(batch([[1.0] * n, [0.0] * n, [1.0] * n])))["eval/reward"] for n in (1, 10))
    assert once == pytest.approx(often)


def test_values_of_prompts_and_swept_settings_have_errors_under_their_metric():
    values = {"pass@2": torch.tensor([1.0, 0.0, NAN], dtype=torch.float64)}
    part = Scored(batch([[1.0], [0.0], [NAN]]), "@n=2", per_prompt=values)
    assert errors(part)["eval/pass@2@n=2"] == pytest.approx(0.5)


def test_one_prompt_has_no_error():
    assert errors(Scored(batch([[1.0, 0.0]]))) == {}

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from realign.api import SequenceSample
from realign.functional import identity
from realign.interfaces.components import RewardScale, RewardShaping

NAN = math.nan


class Scores:
    """Reward shaping with the running moments that an interface stores for it."""

    def __init__(self, **settings) -> None:
        self.shaping = RewardShaping(**settings)
        self.moments = self.shaping.moments()

    def __call__(self, rewards: list[float]) -> list[float]:
        rewards_S = torch.tensor(rewards)
        self.shaping.observe(self.moments, rewards_S, rewards_S.isfinite(), identity)
        return self.shaping.shape(self.moments, rewards_S).tolist()


def test_affine_map_then_clip():
    assert Scores(bias=1.0, gain=2.0, clip=5.0)([0.0, 1.0, 2.0, -9.0]) == [2.0, 4.0, 5.0, -5.0]


def test_running_scale_divides_by_the_sample_deviation_of_all_scores_so_far_after_the_clip():
    shaping = Scores(clip=10.0, scale=RewardScale.running)
    first = shaping([1.0, 3.0, 50.0])
    std = np.std([1, 3, 10], ddof=1)
    np.testing.assert_allclose(first, np.array([1, 3, 10]) / std, rtol=1e-6)
    second = shaping([2.0, 4.0])
    np.testing.assert_allclose(second, np.array([2, 4]) / np.std([1, 3, 10, 2, 4], ddof=1), rtol=1e-6)


def test_ref_scale_is_that_of_the_first_batch_for_good():
    shaping = Scores(scale=RewardScale.ref)
    shaping([1.0, 3.0])
    np.testing.assert_allclose(shaping([100.0, 0.0]), np.array([100, 0]) / np.std([1, 3], ddof=1), rtol=1e-6)


def test_missing_scores_stay_missing_and_are_in_no_moment():
    shaping = Scores(scale=RewardScale.running)
    values = shaping([1.0, NAN, 3.0])
    assert math.isnan(values[1])
    assert shaping.moments.std == pytest.approx(math.sqrt(2))


def test_the_baseline_of_a_response_is_the_shaped_score_of_its_prompt():
    data = SequenceSample.from_sequences(["a", "b"], {"input_ids": [[[1], [2]], [[3]]]})
    shaping = Scores(gain=10.0, baseline="greedy")
    greedy = SequenceSample.from_sequences(["a", "b"], {"greedy": [[[1]], [[1]]]})
    greedy = greedy.with_data({"baseline_rewards": torch.tensor([2.0, 5.0])}, like="greedy")
    whole = data.merge(greedy.select(["baseline_rewards"]))
    assert shaping.shaping.baselines(shaping.moments, whole).tolist() == [20.0, 20.0, 50.0]
    assert shaping.shaping.baselines(shaping.moments, data) == 0.0

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from realign.interfaces.shaping import RewardScale, RewardShaping, TruncatedReward, Truncation

from realign.functional import whiten

NAN = math.nan


def identity(x: torch.Tensor) -> torch.Tensor:
    return x


def shaped(shaping: RewardShaping, rewards: list[float], valid: list[bool] | None = None) -> list[float]:
    rewards_S = torch.tensor(rewards)
    valid_S = rewards_S.isfinite() if valid is None else torch.tensor(valid)
    shaping.observe(rewards_S, valid_S, identity)
    return shaping.shape(rewards_S).tolist()


def test_affine_map_then_clip():
    assert shaped(RewardShaping(bias=1.0, gain=2.0, clip=5.0), [0.0, 1.0, 2.0, -9.0]) == [2.0, 4.0, 5.0, -5.0]


def test_running_scale_divides_by_the_sample_deviation_of_all_scores_so_far_after_the_clip():
    shaping = RewardShaping(clip=10.0, scale=RewardScale.running)
    first = shaped(shaping, [1.0, 3.0, 50.0])
    std = np.std([1, 3, 10], ddof=1)
    np.testing.assert_allclose(first, np.array([1, 3, 10]) / std, rtol=1e-6)
    second = shaped(shaping, [2.0, 4.0])
    np.testing.assert_allclose(second, np.array([2, 4]) / np.std([1, 3, 10, 2, 4], ddof=1), rtol=1e-6)


def test_ref_scale_is_that_of_the_first_batch_for_good():
    shaping = RewardShaping(scale=RewardScale.ref)
    shaped(shaping, [1.0, 3.0])
    np.testing.assert_allclose(shaped(shaping, [100.0, 0.0]), np.array([100, 0]) / np.std([1, 3], ddof=1), rtol=1e-6)


def test_centred_scores_have_the_running_mean_taken_off():
    shaping = RewardShaping(scale=RewardScale.running, center=True)
    shaped(shaping, [1.0, 3.0])
    want = (np.array([2, 6]) - 3.0) / np.std([1, 3, 2, 6], ddof=1)
    np.testing.assert_allclose(shaped(shaping, [2.0, 6.0]), want, rtol=1e-6)


def test_missing_scores_stay_missing_and_are_in_no_moment():
    shaping = RewardShaping(scale=RewardScale.running)
    values = shaped(shaping, [1.0, NAN, 3.0])
    assert math.isnan(values[1])
    assert shaping.moments.std == pytest.approx(math.sqrt(2))


def test_scores_that_are_all_the_same_are_left_as_they_are():
    assert shaped(RewardShaping(scale=RewardScale.running), [2.0, 2.0]) == [2.0, 2.0]
    nearly = [0.1, 0.1, 0.1 + 1e-8]  # the rounding of fp32 is no scale
    np.testing.assert_allclose(shaped(RewardShaping(scale=RewardScale.ref), nearly), nearly, rtol=1e-6)


def test_state_is_restored():
    shaping, other = RewardShaping(scale=RewardScale.running), RewardShaping(scale=RewardScale.running)
    shaped(shaping, [1.0, 5.0, 7.0])
    other.load_state_dict(shaping.state_dict())
    assert shaped(other, [3.0]) == shaped(shaping, [3.0])
    assert RewardShaping().state_dict() == {}


def test_whitening_keeps_the_mean():
    x, mask = torch.tensor([1.0, 2.0, 6.0, NAN]), torch.tensor([True, True, True, False])
    got = RewardShaping(whiten=True).tokens(x, mask, identity)
    assert torch.equal(got, whiten(x, mask, shift_mean=False))
    assert float(got[:3].mean()) == pytest.approx(3.0)
    assert RewardShaping().tokens(x, mask, identity) is x


SCORES, CUT = [1.0, -2.0, NAN], [True, False, True]


@pytest.mark.parametrize(
    ("policy", "want"),
    [
        (Truncation(), [1.0, -2.0, NAN]),
        (Truncation(reward=TruncatedReward.zero), [0.0, -2.0, NAN]),
        (Truncation(reward=TruncatedReward.add, penalty=-0.5), [0.5, -2.0, NAN]),
        (Truncation(reward=TruncatedReward.set, penalty=-1.0), [-1.0, -2.0, NAN]),
    ],
    ids=["keep", "zero", "add", "set"],
)
def test_trap_c11_a_penalty_replaces_or_is_added_as_the_flag_says(policy, want):
    got = policy.scores(torch.tensor(SCORES), torch.tensor(CUT), torch.tensor([4, 2, 4]), 4)
    np.testing.assert_array_equal(got.numpy(), np.array(want, dtype=np.float32))


def test_the_overlong_penalty_grows_within_the_buffer():
    policy = Truncation(overlong_buffer=4, overlong_penalty=2.0)
    got = policy.scores(torch.zeros(4), None, torch.tensor([6, 7, 8, 10]), 10)
    assert got.tolist() == pytest.approx([0.0, -0.5, -1.0, -2.0])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"reward": TruncatedReward.add}, "need a penalty"),
        ({"penalty": -1.0}, "truncation.reward=keep with truncation.penalty=-1.0"),
        ({"mask": True, "bootstrap": True}, "truncation.mask=true"),
        ({"overlong_buffer": -1}, "must not be negative"),
        ({"overlong_penalty": 2.0}, "overlong_penalty=2 has no effect with truncation.overlong_buffer=0"),
    ],
)
def test_truncation_settings_that_contradict_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Truncation(**kwargs)


def test_shaping_settings_are_checked():
    with pytest.raises(ValueError, match="clip must be positive"):
        RewardShaping(clip=0)
    with pytest.raises(ValueError, match="center=true"):
        RewardShaping(center=True)
    with pytest.raises(ValueError, match="gain=0"):
        RewardShaping(gain=0)

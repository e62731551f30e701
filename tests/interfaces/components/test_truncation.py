from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from realign.errors import SettingsError
from realign.interfaces.components import TruncatedReward, Truncation
from realign.interfaces.components.truncation import overlong_penalty

NAN = math.nan
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


def test_masked_responses_leave_the_loss():
    valid_S, cut_S = torch.tensor([True, True, False]), torch.tensor([True, False, True])
    assert Truncation(mask=True).keep_in_loss(valid_S, cut_S).tolist() == [False, True, False]
    assert torch.equal(Truncation().keep_in_loss(valid_S, cut_S), valid_S)
    assert torch.equal(Truncation(mask=True).keep_in_loss(valid_S, None), valid_S)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward": "add"}, "penalty=null: not valid with reward=add. Set penalty to a number"),
        ({"penalty": -1.0}, "penalty=-1: has no effect with reward=keep. Set reward=add or reward=set"),
        ({"reward": "zero", "mask": True}, "reward=zero: has no effect with mask=true"),
        ({"reward": "drop"}, r"reward='drop': unknown choice \(valid: keep, zero, add, set\)"),
        ({"overlong_penalty": 2.0}, "overlong_penalty=2: has no effect with overlong_buffer=0"),
        ({"overlong_buffer": 4, "overlong_penalty": -2.0}, "overlong_penalty=-2.0: must be at least 0"),
    ],
)
def test_wrong_settings_raise(settings, message):
    with pytest.raises(SettingsError, match=message):
        Truncation(**settings)


def test_settings_that_do_not_fit_the_actor_raise():
    with pytest.raises(SettingsError, match=r"truncation\.overlong_buffer=300: must be at most generation"):
        Truncation(overlong_buffer=300).check(longest=256, baseline=False)
    for policy in (Truncation("zero"), Truncation(overlong_buffer=1)):
        with pytest.raises(SettingsError, match=r"reward\.baseline=greedy: truncation\.reward"):
            policy.check(longest=256, baseline=True)
        policy.check(longest=256, baseline=False)
    Truncation(mask=True).check(longest=1, baseline=True)


def test_the_penalty_of_dapo_equation_13():
    # Limit 10, buffer 4: no penalty up to 6 tokens, then a quarter per token, and 1 from the limit on.
    lengths_S = torch.tensor([0, 5, 6, 7, 8, 9, 10, 11])
    expected = [0, 0, 0, -0.25, -0.5, -0.75, -1, -1]
    assert overlong_penalty(lengths_S, 10, 4, 1.0).tolist() == expected
    assert overlong_penalty(lengths_S, 10, 4, 2.0).tolist() == [2 * x for x in expected]
    assert overlong_penalty(lengths_S, 10, 10, 1.0).tolist() == pytest.approx([0, -0.5, -0.6, -0.7, -0.8, -0.9, -1, -1])
    assert overlong_penalty(lengths_S, 10, 1, 1.0).tolist() == [0, 0, 0, 0, 0, 0, -1, -1]
    assert not overlong_penalty(lengths_S, 10, 4, 0.0).any()
    assert overlong_penalty(lengths_S, 10, 4, 1.0).dtype == torch.float32

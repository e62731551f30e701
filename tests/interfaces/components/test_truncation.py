from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from realign.errors import SettingsError
from realign.interfaces.components import TruncatedReward, Truncation

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


def test_the_overlong_penalty_grows_within_the_buffer():
    policy = Truncation(overlong_buffer=4, overlong_penalty=2.0)
    got = policy.scores(torch.zeros(4), None, torch.tensor([6, 7, 8, 10]), 10)
    assert got.tolist() == pytest.approx([0.0, -0.5, -1.0, -2.0])


def test_masked_responses_leave_the_loss():
    valid_S, cut_S = torch.tensor([True, True, False]), torch.tensor([True, False, True])
    assert Truncation(mask=True).kept(valid_S, cut_S).tolist() == [False, True, False]
    assert torch.equal(Truncation().kept(valid_S, cut_S), valid_S)
    assert torch.equal(Truncation(mask=True).kept(valid_S, None), valid_S)


def test_truncated_is_needed_where_it_is_read():
    for policy in (Truncation(mask=True), Truncation("zero"), Truncation("set", penalty=-1.0)):
        assert policy.needs() == {"truncated": "truncation"}
    for policy in (Truncation(), Truncation(overlong_buffer=4)):
        assert policy.needs() == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward": "add"}, "penalty=None: not valid with reward=add. Set penalty to a number"),
        ({"penalty": -1.0}, "penalty=-1.0: not valid with reward=keep. Set reward=add or reward=set"),
        ({"reward": "zero", "mask": True}, "reward=zero: has no effect with mask=true"),
        ({"reward": "drop"}, r"reward='drop': unknown choice \(valid: keep, zero, add, set\)"),
        ({"overlong_buffer": -1}, "overlong_buffer=-1: must be at least 0"),
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


def test_the_launch_table_lists_the_treatment():
    assert Truncation().describe() == ""
    assert Truncation("zero").describe() == "score set to 0"
    assert Truncation("set", penalty=-1.0).describe() == "score set to -1"
    assert Truncation("add", penalty=-0.5).describe() == "score lowered by 0.5"
    assert Truncation("add", penalty=0.5).describe() == "score raised by 0.5"
    assert Truncation(mask=True).describe() == "not in the loss"

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realign.functional.selection import keep_best


def best(rewards, groups, valid, k):
    rewards_S = torch.tensor(rewards, dtype=torch.float32)
    return keep_best(rewards_S, torch.tensor(groups), torch.tensor(valid, dtype=torch.bool), k).nonzero()[:, 0].tolist()


def test_trap_e9_rejected_responses_take_no_place():
    valid = [True, False, True, False, False, True, False]
    rewards = [1, math.nan, 3, math.inf, math.nan, -math.inf, 0]
    assert best(rewards, [0, 0, 0, 1, 1, 1, 2], valid, 1) == [2, 5]
    assert best(rewards, [0, 0, 0, 1, 1, 1, 2], valid, 2) == [0, 2, 5]
    assert best(rewards, [0] * 7, [False] * 7, 2) == []
    assert (
        keep_best(torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool), 1).tolist() == []
    )


rows = st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 3), st.booleans()), max_size=20)


@settings(deadline=None)  # the machine may be busy
@given(rows, st.integers(1, 4))
def test_the_choice_is_that_of_sorting_each_group(rows, k):
    expected = []
    for group in {g for _, g, _ in rows}:
        members = [i for i, (_, g, valid) in enumerate(rows) if g == group and valid]
        expected += sorted(members, key=lambda i: (-rows[i][0], i))[:k]
    if rows:
        assert best(*map(list, zip(*rows, strict=True)), k) == sorted(expected)


def test_bad_input_of_the_choice_is_named():
    with pytest.raises(ValueError, match="k must be at least 1, found 0"):
        best([1], [0], [True], 0)
    with pytest.raises(ValueError, match="NaN and cannot be ranked"):
        best([math.nan], [0], [True], 1)
    with pytest.raises(ValueError, match="group_S has shape"):
        best([1], [0, 0], [True], 1)

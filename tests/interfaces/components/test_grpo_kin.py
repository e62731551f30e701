"""Compare GRPO and its variants, which are settings of one normalization, with their own formulas in numpy.

Each reference follows its paper or the named library, one group at a time, with the constants of that library.
Groups are ragged, and their responses are in any order.
"""

from __future__ import annotations

import torch

from realign.interfaces.components.advantages import degenerate_rescale
from tests.formulas import over_ranks


def test_gpg_by_hand_and_what_verl_counts_instead():
    rewards_S, group_S = torch.tensor([1.0, 1, 1, 0, 0, 0]), torch.tensor([5, 5, 2, 2, 9, 9])
    everyone = torch.ones(6, dtype=torch.bool)
    assert degenerate_rescale(rewards_S, group_S, everyone).item() == 3  # only group 2 has different rewards
    assert len(rewards_S) / rewards_S.count_nonzero().item() == 2  # alpha of verl: half of the answers are right
    assert degenerate_rescale(rewards_S, group_S, group_S != 5).item() == 2
    assert degenerate_rescale(rewards_S, group_S, group_S == 5).item() == 1
    assert degenerate_rescale(rewards_S, group_S, ~everyone).item() == 1


def test_trap_e10_gpg_counts_over_all_ranks():
    rewards_S, group_S = torch.tensor([1.0, 1, 1, 0, 0, 0, 3, 4]), torch.tensor([5, 5, 2, 2, 9, 9, 1, 1])
    everyone = torch.ones(8, dtype=torch.bool)
    got = over_ranks(
        [slice(0, 4), slice(4, 4), slice(4, 8)],
        lambda part, reduce: degenerate_rescale(rewards_S[part], group_S[part], everyone[part], reduce).view(1),
    )
    assert got.tolist() == [2, 2, 2]

"""A custom advantage estimator in one file: GRPO on the ranks of rewards, which do not depend on the scale of rewards.

Run it from the repository root. It needs no registration and no change of the package:

    realign experiment=grpo_arithmetic interfaces.actor.advantage._target_=examples.rank_grpo.RankRelative
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from realign.api import SequenceSample
from realign.functional import Reduce, segment_sum
from realign.interfaces.components import GroupRelative, Rewards


@dataclass
class RankRelative(GroupRelative):
    """Rank of a response's reward in its group, from -1 (lowest) to 1 (highest). Equal rewards have equal ranks."""

    def estimate(self, rewards: Rewards, data: SequenceSample, reduce: Reduce) -> Tensor:
        """Return the rank [S] among the responses of the group that train; see `AdvantageEstimator`."""
        group_S, ranks_S = data.group_index(), torch.zeros_like(rewards.per_sequence)
        trained_S = rewards.per_sequence.isfinite() & (segment_sum(rewards.mask_T, rewards.cu_seqlens) > 0)
        for group in group_S.unique():
            here_S = trained_S & (group_S == group)
            rewards_G = rewards.per_sequence[here_S]
            above_G = (rewards_G[:, None] > rewards_G).sum(1) - (rewards_G[:, None] < rewards_G).sum(1)
            ranks_S[here_S] = above_G.to(ranks_S) / max(1, len(rewards_G) - 1)
        return ranks_S

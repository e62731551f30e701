"""MaxRL: the advantage of a response is its reward relative to the mean reward of its prompt.

Use it with `interfaces.actor.advantage._target_=examples.maxrl.MaxRL` and without a further normalization
(`interfaces.actor.adv_norm.mean=none interfaces.actor.adv_norm.std=none`). Rewards must not be negative.
"""

from __future__ import annotations

import torch
from torch import Tensor

from realign.api import SequenceSample
from realign.functional import Reduce, Scope, normalize, segment_sum
from realign.interfaces.components import AdvantageEstimator, Rewards


class MaxRL(AdvantageEstimator):
    """Estimator of (reward - mean) / mean over the responses to a prompt; 0 where the mean is 0."""

    def estimate(self, rewards: Rewards, data: SequenceSample, reduce: Reduce) -> Tensor:
        """Return the advantage of every response; see `AdvantageEstimator`."""
        rewards_S, group_S = rewards.per_sequence, data.group_index()
        valid_S = rewards_S.isfinite() & (segment_sum(rewards.mask_T, rewards.cu_seqlens) > 0)
        above_S = normalize(rewards_S, group_S, valid_S, mean=Scope.group, std=Scope.none)
        mean_S = rewards_S - above_S
        return torch.where(mean_S > 0, above_S / mean_S, 0)

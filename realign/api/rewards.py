"""Total reward of each response, from sequence-level and token-level rewards."""

from __future__ import annotations

import torch
from torch import Tensor

from realign.api.sample import SequenceSample
from realign.functional import segment_sum


def total_rewards(data: SequenceSample) -> Tensor:
    """Return the reward [S] of each sequence: `rewards`, plus the sum of `dense_rewards` if the batch has them.

    Counts only dense rewards of tokens in `loss_mask`, if the batch has that key. NaN means a missing reward.
    """
    if "dense_rewards" not in data:
        return data["rewards"]
    dense_T = data["dense_rewards"]
    if "loss_mask" in data:
        dense_T = torch.where(data["loss_mask"], dense_T, 0)
    return data["rewards"] + segment_sum(dense_T, data.cu_seqlens())


__all__ = ["total_rewards"]

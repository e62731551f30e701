"""Total reward of each response, from sequence-level and token-level rewards, and the named rewards it consists of."""

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


NAMED = "rewards/"
"""Prefix of the keys [S] of named rewards, such as `rewards/accuracy`. A run reports each of them."""


def named_rewards(data: SequenceSample) -> dict[str, Tensor]:
    """Return the named rewards [S] of a batch by their keys, such as `rewards/accuracy`, in alphabetical order."""
    names = sorted(key for key in data.data if key.startswith(NAMED))
    return {key: data[key] for key in names if len(data[key]) == data.n_sequences}


__all__ = ["NAMED", "named_rewards", "total_rewards"]

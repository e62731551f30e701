"""Selection of responses by their rewards."""

from __future__ import annotations

import torch
from torch import Tensor

from .packed import check_shapes


@torch.no_grad()
def keep_best(rewards_S: Tensor, group_S: Tensor, valid_S: Tensor, k: int) -> Tensor:
    """Select the `k` largest valid rewards of each group. Ties go to the first ones.

    Source: best-of-n selection (RAFT, arXiv:2304.06767; realhf's best-of-k, `generation_size` above `group_size`).

    Args:
        rewards_S: [S]. Values where `valid_S` is False are ignored, including NaN.
        group_S: [S] ints, equal for the responses to one prompt; any ids in any order, groups of any sizes.
        valid_S: [S] bool, the responses to select from.
        k: number of responses to select per group, >= 1. A group with fewer valid responses keeps all of them.

    Returns:
        bool [S].

    Raises:
        ValueError: `k` is below 1, a shape is wrong, or a valid reward is NaN.
    """
    check_shapes(rewards_S, group_S=group_S, valid_S=valid_S)
    if k < 1:
        raise ValueError(f"k must be at least 1, found {k}")
    valid = valid_S.nonzero()[:, 0]
    if bool(rewards_S[valid].isnan().any()):
        raise ValueError("a valid reward is NaN and cannot be ranked. Exclude it from valid_S")
    ranked = valid[rewards_S[valid].sort(descending=True, stable=True).indices]
    ranked = ranked[group_S[ranked].sort(stable=True).indices]  # grouped, in descending order of reward
    _, size_G = group_S[ranked].unique_consecutive(return_counts=True)
    first_G = size_G.cumsum(0) - size_G
    rank = torch.arange(len(ranked), device=ranked.device) - first_G.repeat_interleave(size_G)
    keep_S = torch.zeros_like(valid_S)
    keep_S[ranked[rank < k]] = True
    return keep_S

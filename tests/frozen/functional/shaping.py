"""Shaping of sequence scores by length and by rank, before they become credit."""

from __future__ import annotations

import torch
from torch import Tensor

from .packed import check_shapes

__all__ = ["keep_best", "overlong_penalty"]


def overlong_penalty(lengths_S: Tensor, max_tokens: int, buffer: int, penalty: float) -> Tensor:
    """The soft penalty of long responses: 0 up to `max_tokens - buffer`, then linearly down to `-penalty`.

    Source: arXiv:2503.14476 (eq. 13, where `penalty` is 1).

    Args:
        lengths_S: [S] sampled tokens of each response.
        max_tokens: the length limit of a response.
        buffer: the last tokens before the limit, in which the penalty grows; from 1 to `max_tokens`.
        penalty: what a response of `max_tokens` loses, in units of reward, >= 0.

    Returns:
        [S] fp32, to add to the scores; never positive.

    Raises:
        ValueError: a setting is out of its range.
    """
    if not 1 <= buffer <= max_tokens:
        raise ValueError(f"buffer must be from 1 to max_tokens={max_tokens}, found {buffer}")
    if not penalty >= 0:
        raise ValueError(f"penalty is subtracted and must not be negative, found {penalty}")
    room_S = (max_tokens - buffer - lengths_S).clamp(-buffer, 0)
    return room_S.float() * (penalty / buffer)


@torch.no_grad()
def keep_best(rewards_S: Tensor, group_S: Tensor, valid_S: Tensor, k: int) -> Tensor:
    """The `k` largest valid rewards of each group; among equals the first ones.

    Source: best-of-n selection (RAFT, arXiv:2304.06767; realhf's best-of-k, `generation_size` above `group_size`).

    Args:
        rewards_S: [S]. Anything may stand where `valid_S` is False, NaN included.
        group_S: [S] ints, equal for the responses to one prompt; any ids in any order, groups of any sizes.
        valid_S: [S] bool, the responses to choose from.
        k: how many of each group, >= 1; a group with fewer valid ones keeps them all.

    Returns:
        bool [S].

    Raises:
        ValueError: `k` is below 1, a shape is wrong, or a valid reward is NaN, which has no rank.
    """
    check_shapes(rewards_S, group_S=group_S, valid_S=valid_S)
    if k < 1:
        raise ValueError(f"k must be at least 1, found {k}")
    valid = valid_S.nonzero()[:, 0]
    if bool(rewards_S[valid].isnan().any()):
        raise ValueError("a valid reward is NaN and cannot be ranked; take it out of valid_S")
    ranked = valid[rewards_S[valid].sort(descending=True, stable=True).indices]
    ranked = ranked[group_S[ranked].sort(stable=True).indices]  # group after group, each from its best to its worst
    _, size_G = group_S[ranked].unique_consecutive(return_counts=True)
    first_G = size_G.cumsum(0) - size_G
    rank = torch.arange(len(ranked), device=ranked.device) - first_G.repeat_interleave(size_G)
    keep_S = torch.zeros_like(valid_S)
    keep_S[ranked[rank < k]] = True
    return keep_S

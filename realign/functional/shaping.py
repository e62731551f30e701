"""Reward shaping by length and by rank, before advantage estimation."""

from __future__ import annotations

import torch
from torch import Tensor

from .packed import check_shapes

__all__ = ["keep_best", "overlong_penalty"]


def overlong_penalty(lengths_S: Tensor, max_tokens: int, buffer: int, penalty: float) -> Tensor:
    """Compute the soft overlong penalty: 0 up to `max_tokens - buffer`, then linear down to `-penalty`.

    Source: arXiv:2503.14476 (eq. 13, where `penalty` is 1).

    Args:
        lengths_S: [S] sampled tokens of each response.
        max_tokens: length limit of a response, in tokens.
        buffer: number of tokens before the limit over which the penalty grows; from 1 to `max_tokens`.
        penalty: penalty of a response of `max_tokens`, in units of reward, >= 0.

    Returns:
        [S] fp32, to add to the scores; never positive.

    Raises:
        ValueError: an argument is out of range.
    """
    if not 1 <= buffer <= max_tokens:
        raise ValueError(f"buffer must be from 1 to max_tokens={max_tokens}, found {buffer}")
    if not penalty >= 0:
        raise ValueError(f"penalty must be at least 0 (it is subtracted), found {penalty}")
    room_S = (max_tokens - buffer - lengths_S).clamp(-buffer, 0)
    return room_S.float() * (penalty / buffer)


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

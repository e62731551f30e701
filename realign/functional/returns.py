"""Rewards of tokens from sequence scores, and returns and advantages (GAE) along the tokens of a sequence.

The steps of a sequence are its tokens in the mask (the trainable ones). Tokens between them, such as a tool's answer,
are skipped: they cause no discounting, and their values are ignored, including NaN. No gradient flows through these
functions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .packed import at_least_fp32, check_shapes, last_true, sequence_index


@torch.no_grad()
def token_rewards(
    scores_S: Tensor, mask_T: Tensor, cu_seqlens: Tensor, *, kl_T: Tensor | None = None, kl_coef: float = 0.0
) -> Tensor:
    """Compute token rewards: `-kl_coef * kl_T` in the mask, plus the sequence score at its last token in the mask.

    Source: openai/lm-human-preferences (rewards of PPO).

    Args:
        scores_S: [S]. The score of a sequence without tokens in the mask is ignored. NaN propagates, so mask
            sequences with a missing score first.
        mask_T: [T] bool.
        cu_seqlens: int32 [S+1].
        kl_T: [T] in nats, or None.
        kl_coef: coefficient of the KL penalty, in units of reward per nat.

    Returns:
        [T] fp32 (fp64 for fp64 scores), 0 outside the mask.

    Raises:
        ValueError: a shape is wrong, or `kl_coef` is not 0 although `kl_T` is None.
    """
    check_shapes(mask_T, mask_T=mask_T, kl_T=kl_T)
    check_shapes(cu_seqlens[1:], scores_S=scores_S)
    if kl_T is None and kl_coef != 0:
        raise ValueError(f"kl_coef={kl_coef} needs kl_T, found None")
    scores_S = at_least_fp32(scores_S)
    rewards_T = scores_S.new_zeros(len(mask_T))
    if kl_T is not None:
        rewards_T -= kl_coef * torch.where(mask_T, at_least_fp32(kl_T), 0)
    last_S = last_true(mask_T, cu_seqlens)
    trained_S = last_S >= 0
    rewards_T[last_S[trained_S]] += scores_S[trained_S]
    return rewards_T


@torch.no_grad()
def discounted_returns(
    rewards_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, *, gamma: float, bootstrap_S: Tensor | None = None
) -> Tensor:
    """Compute the return R_t = r_t + gamma * R_{t+1} along the tokens in the mask of each sequence.

    Args:
        rewards_T: [T].
        mask_T: [T] bool.
        cu_seqlens: int32 [S+1].
        gamma: discount per token in the mask, in [0, 1].
        bootstrap_S: [S] return after the last token in the mask, for truncated sequences; None means 0.

    Returns:
        [T] fp32 (fp64 for fp64 rewards), 0 outside the mask.
    """
    check_shapes(mask_T, rewards_T=rewards_T, mask_T=mask_T)
    _check_unit_interval(gamma=gamma)
    chain = _chain(mask_T, cu_seqlens)
    rewards_M = at_least_fp32(rewards_T)[chain.slot_M]
    # What follows the last token enters as part of its reward, so the scan needs no special case at the end.
    rewards_M[chain.last_M] += gamma * _bootstrap(chain, rewards_M, bootstrap_S, cu_seqlens)
    return _scatter(_reverse_scan(rewards_M, chain.remaining_M, gamma), chain, mask_T)


@torch.no_grad()
def gae(
    rewards_T: Tensor,
    values_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap_S: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute generalized advantage estimates (GAE) along the tokens in the mask of each sequence.

    A_t = delta_t + gamma * lam * A_{t+1} with delta_t = r_t + gamma * V_{t+1} - V_t. Source: arXiv:1506.02438.

    Args:
        rewards_T: [T].
        values_T: [T] value of the state before token t.
        mask_T: [T] bool.
        cu_seqlens: int32 [S+1].
        gamma: discount per token in the mask, in [0, 1].
        lam: GAE lambda in [0, 1]: 0 is the one-step TD error, and 1 the discounted return minus the value.
        bootstrap_S: [S] value after the last token in the mask: the value of the last state of a truncated sequence,
            and 0 for a finished one. None means 0 for all.

    Returns:
        Advantages and returns (advantages + values), each [T] fp32 (fp64 for fp64 input), 0 outside the mask.
    """
    check_shapes(mask_T, rewards_T=rewards_T, values_T=values_T, mask_T=mask_T)
    _check_unit_interval(gamma=gamma, lam=lam)
    chain = _chain(mask_T, cu_seqlens)
    values_M = at_least_fp32(values_T)[chain.slot_M]
    # The roll brings the next sequence's first value to each last token; the next line overwrites it.
    next_values_M = values_M.roll(-1)
    next_values_M[chain.last_M] = _bootstrap(chain, values_M, bootstrap_S, cu_seqlens)
    deltas_M = at_least_fp32(rewards_T)[chain.slot_M] + gamma * next_values_M - values_M
    advantages_M = _reverse_scan(deltas_M, chain.remaining_M, gamma * lam)
    return _scatter(advantages_M, chain, mask_T), _scatter(advantages_M + values_M, chain, mask_T)


@torch.no_grad()
def n_step(
    rewards_T: Tensor,
    values_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float,
    n: int,
    bootstrap_S: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute n-step returns along the tokens in the mask of each sequence, and advantages (returns - values).

    R_t = r_t + gamma r_{t+1} + ... + gamma^(n-1) r_{t+n-1} + gamma^n V_{t+n}. The sum ends with the sequence. With n=1,
    advantages equal `gae` with lam=0; with n at least the number of tokens in the mask, they equal `gae` with lam=1.

    Args:
        rewards_T: [T].
        values_T: [T] value of the state before token t.
        mask_T: [T] bool.
        cu_seqlens: int32 [S+1].
        gamma: discount per token in the mask, in [0, 1].
        n: number of rewards in a return, at least 1, counted in tokens in the mask.
        bootstrap_S: [S] value after the last token in the mask, as in `gae`; None means 0 for all.

    Returns:
        Advantages and returns, each [T] fp32 (fp64 for fp64 input), 0 outside the mask.
    """
    check_shapes(mask_T, rewards_T=rewards_T, values_T=values_T, mask_T=mask_T)
    _check_unit_interval(gamma=gamma)
    if n < 1:
        raise ValueError(f"n must be at least 1, found {n}")
    chain = _chain(mask_T, cu_seqlens)
    values_M, rewards_M = at_least_fp32(values_T)[chain.slot_M], at_least_fp32(rewards_T)[chain.slot_M]
    rewards_M[chain.last_M] += gamma * _bootstrap(chain, values_M, bootstrap_S, cu_seqlens)
    # A window that reaches the end has taken the bootstrap value with the last reward, and `_later` is 0 there.
    returns_M = _window_sum(rewards_M, chain.remaining_M, gamma, n)
    returns_M += gamma**n * _later(values_M, chain.remaining_M, n)
    return _scatter(returns_M - values_M, chain, mask_T), _scatter(returns_M, chain, mask_T)


class _Chain(NamedTuple):
    """The M tokens in the mask, in sequence order."""

    slot_M: Tensor
    """Packed slot of each token."""
    sequence_M: Tensor
    """Sequence index of each token."""
    remaining_M: Tensor
    """Number of later tokens in the mask in the same sequence."""
    last_M: Tensor
    """bool: whether the token is the last of its sequence."""


def _chain(mask_T: Tensor, cu_seqlens: Tensor) -> _Chain:
    slot_M = mask_T.nonzero()[:, 0]
    sequence_M = sequence_index(cu_seqlens)[slot_M]
    counts_S = torch.bincount(sequence_M, minlength=len(cu_seqlens) - 1)
    remaining_M = counts_S.cumsum(0)[sequence_M] - 1 - torch.arange(len(slot_M), device=mask_T.device)
    return _Chain(slot_M, sequence_M, remaining_M, remaining_M == 0)


def _bootstrap(chain: _Chain, like_M: Tensor, bootstrap_S: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """Return the bootstrap value after each `last_M` token."""
    sequences = chain.sequence_M[chain.last_M]
    if bootstrap_S is None:
        return like_M.new_zeros(len(sequences))
    check_shapes(cu_seqlens[1:], bootstrap_S=bootstrap_S)
    return bootstrap_S[sequences].to(like_M.dtype)


def _reverse_scan(x_M: Tensor, remaining_M: Tensor, decay: float) -> Tensor:
    """Compute y_i = x_i + decay * y_{i+1} within each sequence, for all sequences in parallel.

    Uses doubling: after k rounds, y_i covers the 2**k tokens from i. The number of vectorized rounds is log2 of the
    longest sequence's length.
    """
    y_M = x_M.clone()
    longest = int(remaining_M.max()) + 1 if len(remaining_M) else 0
    step, factor = 1, decay
    # The factor is 0 with decay=0, or once it underflows: nothing further would be added.
    while step < longest and factor != 0:
        inside = remaining_M[:-step] >= step
        # The slices overlap, but the right side is a new tensor before the addition.
        y_M[:-step] += torch.where(inside, y_M[step:] * factor, 0)
        step, factor = step * 2, factor * factor
    return y_M


def _window_sum(x_M: Tensor, remaining_M: Tensor, decay: float, width: int) -> Tensor:
    """Compute y_i = x_i + decay x_{i+1} + ... + decay^(width-1) x_{i+width-1} within each sequence.

    Uses doubling, as `_reverse_scan`: y_i is put together from windows of 1, 2, 4, ... tokens, the bits of `width`.
    The order of additions depends on `width` alone, so packing is invisible.
    """
    y_M, block_M = torch.zeros_like(x_M), x_M
    covered, size = 0, 1
    while covered < width:
        if width & size:
            y_M = y_M + decay**covered * _later(block_M, remaining_M, covered)
            covered += size
        block_M = block_M + decay**size * _later(block_M, remaining_M, size)
        size *= 2
    return y_M


def _later(x_M: Tensor, remaining_M: Tensor, distance: int) -> Tensor:
    """Return `x_M` of the token `distance` tokens later in the same sequence, 0 where there is none."""
    shifted_M, length = torch.zeros_like(x_M), max(len(x_M) - distance, 0)
    shifted_M[:length] = torch.where(remaining_M[:length] >= distance, x_M[distance:], 0)
    return shifted_M


def _scatter(x_M: Tensor, chain: _Chain, mask_T: Tensor) -> Tensor:
    return x_M.new_zeros(len(mask_T)).index_copy_(0, chain.slot_M, x_M)


def _check_unit_interval(**rates: float) -> None:
    for name, rate in rates.items():
        if not 0 <= rate <= 1:
            raise ValueError(f"{name} must be in [0, 1], found {rate}")

"""Policy objectives: the loss of one token, from its log-probs and its advantage.

All are per token and 0 off the mask, for `aggregation.aggregate` to sum. Those that look at a whole sequence
(`gspo_loss`, `gmpo_loss`) need it whole, and no micro-batch cuts one. Only the current log-probs are differentiated.
The clipped objective of PPO is `losses.policy_loss`.

Notation: l = logprobs - old (clamped at `kl.LOG_RATIO_LIMIT`), r = exp(l), A the advantage, sg(x) a constant with the
value of x. The mean over a sequence is the mean over its masked tokens.

Shared arguments: `logprobs_T` [T] of the policy that is trained, differentiable; `old_logprobs_T` [T] of the policy
that ratios are taken against; `advantages_T` [T]; `mask_T` [T] bool; `cu_seqlens` int32 [S+1]. Each function returns a
`PolicyLoss`, whose `ratio_T` is what the clip looks at (the sequence's ratio in `gspo_loss`, else r). A wrong shape, or
a setting out of its range, raises `ValueError`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .kl import log_ratio
from .losses import PolicyLoss, policy_loss
from .packed import at_least_fp32, broadcast_to_tokens, check_shapes, segment_sum

__all__ = ["cispo_loss", "gmpo_loss", "gspo_loss", "reinforce_loss", "sapo_loss", "sequence_mean"]


def reinforce_loss(logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor) -> PolicyLoss:
    """-A logprobs: the policy gradient itself, without a ratio (REINFORCE; GPG, arXiv:2504.02546).

    With A = 1 for the kept responses this is RAFT, while RAFT++ (arXiv:2504.11343) is the clipped objective. It assumes
    that the current policy sampled the tokens: one optimizer step per rollout, or an importance correction.
    """
    log_ratio_T, clamped_T = log_ratio(logprobs_T, old_logprobs_T, mask_T)
    loss_T = -_advantages(advantages_T, mask_T) * _current(logprobs_T, mask_T)
    return _unclipped(loss_T, log_ratio_T.exp(), clamped_T)


def cispo_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    low: float | None = None,
    high: float = 4.0,
) -> PolicyLoss:
    """-sg(clip(r, 1 - low, 1 + high)) A logprobs (arXiv:2506.13585, eq. 4 and 5): no token loses its gradient.

    The paper sets no lower bound (`low=None`). verl and SkyRL count both bounds from 1, as here. TRL's `epsilon_high`
    and Tinker's thresholds are the bounds themselves, so a cap of 5 there is `high=4` here. `clipped_T` marks tokens
    whose weight a bound changes.
    """
    _check_range(low, high, lowest=1)
    log_ratio_T, clamped_T = log_ratio(logprobs_T, old_logprobs_T, mask_T)
    ratio_T = log_ratio_T.exp().detach()
    bounded_T = ratio_T.clamp(1 - (1.0 if low is None else low), 1 + high)
    loss_T = -_advantages(advantages_T, mask_T) * bounded_T * _current(logprobs_T, mask_T)
    return _unclipped(loss_T, ratio_T, clamped_T)._replace(clipped_T=bounded_T != ratio_T)


def gspo_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    *,
    low: float = 3e-4,
    high: float = 4e-4,
    dual: float | None = None,
) -> PolicyLoss:
    """max(-A s, -A clip(s, 1 - low, 1 + high)) with s = exp(mean of l over the sequence) (arXiv:2507.18071, eq. 5, 7).

    The gradient goes through s, so every token of a sequence gets the same fraction of it. The mean over the tokens of
    a sequence is the paper's loss (aggregate by `seq_mean_token_mean`, which verl forces). verl and SkyRL let each
    token's own log-prob carry the gradient of s (the paper's GSPO-token): the same where A is constant in a sequence.
    """
    log_ratio_T, clamped_T = log_ratio(logprobs_T, old_logprobs_T, mask_T)
    mean_T = sequence_mean(log_ratio_T, mask_T, cu_seqlens)
    clip = policy_loss(
        mean_T, torch.zeros_like(mean_T), advantages_T, mask_T, clip_low=low, clip_high=high, dual_clip=dual
    )
    return clip._replace(clamped_T=clamped_T)


def sapo_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> PolicyLoss:
    """-A (4 / tau) sigmoid(tau (r - 1)), tau = tau_pos where A > 0, else tau_neg (arXiv:2511.20347, eq. 5 and 6).

    A smooth gate instead of the clip, whose gradient at r = 1 is that of -A logprobs. The larger tau, the faster the
    gradient fades away from r = 1. verl, TRL, AReaL and Trinity agree on it. The paper takes the mean over each
    sequence, then over sequences.
    """
    if not (tau_pos > 0 and tau_neg > 0):
        raise ValueError(f"tau_pos and tau_neg must be positive, found {tau_pos} and {tau_neg}")
    log_ratio_T, clamped_T = log_ratio(logprobs_T, old_logprobs_T, mask_T)
    advantages_T, ratio_T = _advantages(advantages_T, mask_T), log_ratio_T.exp()
    tau_T = torch.full_like(ratio_T, tau_neg).masked_fill(advantages_T > 0, tau_pos)
    loss_T = -advantages_T * torch.sigmoid(tau_T * (ratio_T - 1)) * (4 / tau_T)
    return _unclipped(loss_T, ratio_T, clamped_T)


def gmpo_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    *,
    low: float | None = 0.4,
    high: float = 0.4,
) -> PolicyLoss:
    """-A exp(mean of k over the sequence), k = min(l, high) where A > 0, max(l, -low) where A < 0 (arXiv:2507.20673).

    The geometric mean of ratios that are clipped one by one. The range is one of log-ratios, as in verl and TRL: the
    paper's (exp(-0.4), exp(0.4)) is 0.4 and 0.4; `low=None` sets no lower bound. A clipped token stays in the mean and
    has no gradient. The mean over the tokens of a sequence is the paper's loss (`seq_mean_token_mean`).
    """
    _check_range(low, high, lowest=math.inf)
    log_ratio_T, clamped_T = log_ratio(logprobs_T, old_logprobs_T, mask_T)
    advantages_T, lowest = _advantages(advantages_T, mask_T), -math.inf if low is None else -low
    clipped_T = ((advantages_T > 0) & (log_ratio_T > high)) | ((advantages_T < 0) & (log_ratio_T < lowest))
    held_T = torch.where(clipped_T, log_ratio_T.clamp(lowest, high), log_ratio_T)
    loss_T = -advantages_T * sequence_mean(held_T, mask_T, cu_seqlens).exp()
    return _unclipped(loss_T, log_ratio_T.exp(), clamped_T)._replace(clipped_T=clipped_T.detach())


def sequence_mean(x_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] mean over the masked tokens of each sequence, at all of its positions; values off the mask are ignored."""
    check_shapes(mask_T, x_T=x_T)
    count_S = segment_sum(mask_T, cu_seqlens).clamp(min=1)
    return broadcast_to_tokens(segment_sum(torch.where(mask_T, x_T, 0), cu_seqlens) / count_S, cu_seqlens)


def _advantages(advantages_T: Tensor, mask_T: Tensor) -> Tensor:
    check_shapes(mask_T, advantages_T=advantages_T)
    return torch.where(mask_T, at_least_fp32(advantages_T.detach()), 0)


def _current(logprobs_T: Tensor, mask_T: Tensor) -> Tensor:
    return torch.where(mask_T, at_least_fp32(logprobs_T), 0)


def _unclipped(loss_T: Tensor, ratio_T: Tensor, clamped_T: Tensor) -> PolicyLoss:
    never_T = torch.zeros_like(clamped_T)
    return PolicyLoss(loss_T, ratio_T.detach(), never_T, never_T, clamped_T)


def _check_range(low: float | None, high: float, *, lowest: float) -> None:
    if not (low is None or 0 <= low <= lowest) or not high >= 0:
        raise ValueError(f"low must be from 0 to {lowest:g} (None: no bound) and high at least 0, found {low}, {high}")

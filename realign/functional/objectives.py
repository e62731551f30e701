"""Policy objectives: per-token losses from log-probs and advantages.

All losses are per token and 0 outside the mask; `aggregation.aggregate` sums them. `gspo_loss` and `gmpo_loss` need
whole sequences, which micro-batches never split. Only the current log-probs are differentiable.
`losses.policy_loss` is the clipped objective of PPO.

Notation: l = logprobs - old (clamped at `kl.LOG_RATIO_LIMIT`), r = exp(l), A the advantage, sg(x) the detached x. The
mean over a sequence is the mean over its tokens in the mask.

Shared arguments:

- `logprobs_T`: [T] log-probs of the trained policy, differentiable.
- `old_logprobs_T`: [T] log-probs of the policy in the denominator of the ratio.
- `advantages_T`: [T].
- `mask_T`: [T] bool.
- `cu_seqlens`: int32 [S+1].

Each function returns a `PolicyLoss`, whose `ratio_T` is the ratio that the clip applies to (the sequence's ratio in
`gspo_loss`, else r). A wrong shape or an argument out of range raises `ValueError`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .kl import log_ratio
from .losses import PolicyLoss, policy_loss
from .packed import at_least_fp32, broadcast_to_tokens, check_shapes, segment_sum

__all__ = [
    "cispo_loss",
    "gmpo_loss",
    "gspo_loss",
    "proximal_kl_loss",
    "reinforce_loss",
    "sapo_loss",
    "sequence_mean",
]


def reinforce_loss(logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor) -> PolicyLoss:
    """Compute -A logprobs, the policy gradient without a ratio (REINFORCE; GPG, arXiv:2504.02546).

    With A = 1 for the kept responses, this is RAFT. RAFT++ (arXiv:2504.11343) uses the clipped objective. The loss
    assumes that the current policy sampled the tokens: use one optimizer step per rollout, or an importance
    correction.
    """
    log_ratio_T, clamped_T = log_ratio(logprobs_T, old_logprobs_T, mask_T)
    loss_T = -_advantages(advantages_T, mask_T) * _current(logprobs_T, old_logprobs_T, log_ratio_T, clamped_T, mask_T)
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
    """Compute -sg(clip(r, 1 - low, 1 + high)) A logprobs (CISPO, arXiv:2506.13585, eq. 4 and 5).

    Clipped tokens keep their gradient. The paper uses no lower bound (`low=None`). As in verl and SkyRL, both bounds
    are relative to 1. TRL's `epsilon_high` and Tinker's thresholds are absolute, so a cap of 5 there is `high=4`
    here. `clipped_T` marks tokens whose weight a bound changes.
    """
    _check_range(low, high, lowest=1)
    log_ratio_T, clamped_T = log_ratio(logprobs_T, old_logprobs_T, mask_T)
    ratio_T = log_ratio_T.exp().detach()
    bounded_T = ratio_T.clamp(1 - (1.0 if low is None else low), 1 + high)
    current_T = _current(logprobs_T, old_logprobs_T, log_ratio_T, clamped_T, mask_T)
    loss_T = -_advantages(advantages_T, mask_T) * bounded_T * current_T
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
    """Compute max(-A s, -A clip(s, 1 - low, 1 + high)) with s = exp(mean of l over the sequence) (GSPO).

    Source: arXiv:2507.18071, eq. 5 and 7. The gradient flows through s, so every token of a sequence receives the
    same fraction of it. To get the paper's loss, aggregate by `seq_mean_token_mean`, which verl enforces. In verl and
    SkyRL, each token's log-prob carries the gradient of s (the paper's GSPO-token). The result is the same if A is
    constant in a sequence.
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
    """Compute -A (4 / tau) sigmoid(tau (r - 1)), with tau = tau_pos where A > 0, else tau_neg (SAPO).

    Source: arXiv:2511.20347, eq. 5 and 6. A smooth gate replaces the clip. Its gradient at r = 1 equals that of
    -A logprobs. With a larger tau, the gradient decays faster away from r = 1. verl, TRL, AReaL and Trinity implement
    the same loss. The paper averages over each sequence, then over sequences.
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
    """Compute -A exp(mean of k over the sequence), k = min(l, high) where A > 0, max(l, -low) where A < 0 (GMPO).

    Source: arXiv:2507.20673. The loss uses the geometric mean of token ratios that are clipped individually. As in
    verl and TRL, the bounds apply to log-ratios: the paper's (exp(-0.4), exp(0.4)) is 0.4 and 0.4. `low=None` sets no
    lower bound. A clipped token is included in the mean and has no gradient. To get the paper's loss, aggregate by
    `seq_mean_token_mean`.
    """
    _check_range(low, high, lowest=math.inf)
    log_ratio_T, clamped_T = log_ratio(logprobs_T, old_logprobs_T, mask_T)
    advantages_T, lowest = _advantages(advantages_T, mask_T), -math.inf if low is None else -low
    clipped_T = ((advantages_T > 0) & (log_ratio_T > high)) | ((advantages_T < 0) & (log_ratio_T < lowest))
    held_T = torch.where(clipped_T, log_ratio_T.clamp(lowest, high), log_ratio_T)
    loss_T = -advantages_T * sequence_mean(held_T, mask_T, cu_seqlens).exp()
    return _unclipped(loss_T, log_ratio_T.exp(), clamped_T)._replace(clipped_T=clipped_T.detach())


def proximal_kl_loss(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor, *, beta: float = 1.0
) -> PolicyLoss:
    """Compute -(r A - beta k) with k = r - 1 - l: PPO with a KL penalty to the old policy instead of the clip.

    Source: arXiv:1707.06347, eq. 8. k is the k3 estimate of KL(old || current) from the sampled token. The paper sums
    over all actions. For tokens of the old policy, the expected value and gradient of k are those of the sum.
    """
    if not beta >= 0:
        raise ValueError(f"beta must be at least 0, found {beta}")
    log_ratio_T, clamped_T = log_ratio(logprobs_T, old_logprobs_T, mask_T)
    ratio_T, kl_T = log_ratio_T.exp(), torch.expm1(log_ratio_T) - log_ratio_T
    return _unclipped(beta * kl_T - _advantages(advantages_T, mask_T) * ratio_T, ratio_T, clamped_T)


def sequence_mean(x_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Average over the tokens in the mask of each sequence, and broadcast to its tokens: [T].

    Values outside the mask are ignored.
    """
    check_shapes(mask_T, x_T=x_T)
    count_S = segment_sum(mask_T, cu_seqlens).clamp(min=1)
    return broadcast_to_tokens(segment_sum(torch.where(mask_T, x_T, 0), cu_seqlens) / count_S, cu_seqlens)


def _advantages(advantages_T: Tensor, mask_T: Tensor) -> Tensor:
    check_shapes(mask_T, advantages_T=advantages_T)
    return torch.where(mask_T, at_least_fp32(advantages_T.detach()), 0)


def _current(
    logprobs_T: Tensor, old_logprobs_T: Tensor, log_ratio_T: Tensor, clamped_T: Tensor, mask_T: Tensor
) -> Tensor:
    """Return [T] log-probs of the policy, `LOG_RATIO_LIMIT` from the old ones and without gradient where clamped."""
    nearest_T = at_least_fp32(old_logprobs_T.detach()) + log_ratio_T.detach()
    return torch.where(mask_T, torch.where(clamped_T, nearest_T, at_least_fp32(logprobs_T)), 0)


def _unclipped(loss_T: Tensor, ratio_T: Tensor, clamped_T: Tensor) -> PolicyLoss:
    never_T = torch.zeros_like(clamped_T)
    return PolicyLoss(loss_T, ratio_T.detach(), never_T, never_T, clamped_T)


def _check_range(low: float | None, high: float, *, lowest: float) -> None:
    if not (low is None or 0 <= low <= lowest) or not high >= 0:
        raise ValueError(f"low must be from 0 to {lowest:g} (None: no bound) and high at least 0, found {low}, {high}")

"""Policy objectives: what one token adds to the loss, given its log-probs and its advantage, behind one flag.

All are per token and 0 off the mask, for `aggregation.aggregate` to sum; those that look at a whole sequence (`gspo`,
`gmpo`) need it whole, and no micro-batch cuts one. Only the current log-probs are differentiated.

Notation, here and below: l = logprobs - old (clamped at `kl.LOG_RATIO_LIMIT`), r = exp(l), A the advantage, sg(x) a
constant with the value of x, and mean over a sequence the mean over its masked tokens.
"""

from __future__ import annotations

import math
from enum import StrEnum

import torch
from torch import Tensor

from .kl import log_ratio
from .losses import PolicyLoss, policy_loss
from .packed import at_least_fp32, broadcast_to_tokens, check_shapes, segment_sum

__all__ = ["PolicyObjective", "policy_objective"]


class PolicyObjective(StrEnum):
    """The loss of one token."""

    clip = "clip"
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)): PPO (arXiv:1707.06347), as `losses.policy_loss`."""
    reinforce = "reinforce"
    """-A logprobs: the policy gradient itself, without a ratio (REINFORCE; GPG, arXiv:2504.02546; with A = 1 for the
    kept responses RAFT, while RAFT++, arXiv:2504.11343, is `clip`). It takes the tokens as sampled by the current
    policy: one optimizer step per rollout, or correct by `weight_T`."""
    cispo = "cispo"
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprobs (arXiv:2506.13585, eq. 4 and 5): the clip bounds how much a
    token weighs and takes no gradient away. The paper sets no lower bound (`clip_low=None`). verl and SkyRL count
    both bounds from 1, as here; TRL's `epsilon_high` and Tinker's thresholds are the bounds themselves, and TRL has no
    lower one: a cap of 5 there is `clip_high=4` here."""
    gspo = "gspo"
    """max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)) with s = exp(mean of l over the sequence)
    (arXiv:2507.18071, eq. 5 and 7; the paper clips at 3e-4 and 4e-4). The gradient goes through s, so that every token
    of a sequence gets the same share. The mean over the tokens of a sequence is the paper's loss
    (`seq_mean_token_mean`, which verl forces). verl and SkyRL let each token's own log-prob carry the gradient of s
    (the paper's GSPO-token): the same where A does not vary within a sequence."""
    sapo = "sapo"
    """-A (4 / tau) sigmoid(tau (r - 1)), tau = tau_pos where A > 0, else tau_neg (arXiv:2511.20347, eq. 5 and 6; its
    defaults 1 and 1.05): a smooth gate in place of the clip, whose gradient is that of -A logprobs at r = 1. verl, TRL,
    AReaL and Trinity agree on it. The paper takes the mean over each sequence, then over sequences."""
    gmpo = "gmpo"
    """-A exp(mean of k over the sequence), with k = min(l, clip_high) where A > 0, max(l, -clip_low) where A < 0, else
    l (arXiv:2507.20673): the geometric mean of ratios that are clipped one by one. The range is one of log-ratios,
    as in verl and TRL: the paper's (exp(-0.4), exp(0.4)) is 0.4 and 0.4. A clipped token stays in the mean and has no
    gradient. The mean over the tokens of a sequence is the paper's loss
    (`seq_mean_token_mean`)."""

    @property
    def has_clip(self) -> bool:
        """Whether `clip_low` and `clip_high` are read."""
        return self not in (PolicyObjective.reinforce, PolicyObjective.sapo)

    @property
    def has_dual_clip(self) -> bool:
        """Whether there is an unclipped branch that `dual_clip` can bound."""
        return self in (PolicyObjective.clip, PolicyObjective.gspo)


def policy_objective(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    *,
    objective: PolicyObjective,
    clip_low: float | None,
    clip_high: float | None,
    dual_clip: float | None = None,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    weight_T: Tensor | None = None,
) -> PolicyLoss:
    """The loss of every token under one of the policy objectives.

    Source: see `PolicyObjective`.

    Args:
        logprobs_T: [T] of the policy that is trained; differentiable.
        old_logprobs_T: [T] of the policy that ratios are taken against.
        advantages_T: [T].
        mask_T: [T] bool.
        cu_seqlens: int32 [S+1]; sequences must be whole.
        objective: the formula. `reinforce` and `sapo` have no clip and do not read the range.
        clip_low: how far the ratio (in `gmpo` its logarithm) may fall below 1 (0); None: no bound.
        clip_high: how far it may rise above; None: no bound.
        dual_clip: c > 1; where A < 0 the loss is at most -A c. Of `clip` and `gspo` (where it bounds s) only.
        tau_pos: temperature of `sapo` where A > 0.
        tau_neg: its temperature elsewhere; the larger, the faster the gradient fades away from r = 1.
        weight_T: [T] importance weights (`behaviour_weights`) that multiply each token's loss, without gradient. In
            `gmpo`, verl multiplies a sequence by the geometric mean of its weights and TRL weighs the mean of k with
            them instead; weights that are constant in a sequence are the same in verl and here.

    Returns:
        The loss, 0 off the mask, and what metrics are made of. `ratio_T` is what the clip looks at: s in `gspo`, else
        r. `clipped_T` marks tokens whose gradient the clip takes away, in `cispo` those whose weight it bounds.

    Raises:
        ValueError: a shape differs from the mask's, a setting is out of its range, or `dual_clip` has no effect.
    """
    objective = PolicyObjective(objective)
    _check_settings(objective, clip_low, clip_high, dual_clip, tau_pos, tau_neg)
    check_shapes(mask_T, advantages_T=advantages_T, weight_T=weight_T)
    low = 1.0 if clip_low is None else clip_low
    high = math.inf if clip_high is None else clip_high
    log_ratio_T, clamped_T = log_ratio(logprobs_T, old_logprobs_T, mask_T)
    if objective in (PolicyObjective.clip, PolicyObjective.gspo):
        if objective is PolicyObjective.gspo:
            log_ratio_T = _sequence_mean(log_ratio_T, mask_T, cu_seqlens)
        clip = policy_loss(
            log_ratio_T,
            torch.zeros_like(log_ratio_T),
            advantages_T,
            mask_T,
            clip_low=low,
            clip_high=high,
            dual_clip=dual_clip,
            weight_T=weight_T,
        )
        return clip._replace(clamped_T=clamped_T)
    advantages_T = torch.where(mask_T, at_least_fp32(advantages_T.detach()), 0)
    current_T = torch.where(mask_T, at_least_fp32(logprobs_T), 0)
    ratio_T = log_ratio_T.exp()
    clipped_T = torch.zeros_like(mask_T)
    match objective:
        case PolicyObjective.reinforce:
            loss_T = -advantages_T * current_T
        case PolicyObjective.cispo:
            bounded_T = ratio_T.detach().clamp(1 - low, 1 + high)
            clipped_T = bounded_T != ratio_T.detach()
            loss_T = -advantages_T * bounded_T * current_T
        case PolicyObjective.sapo:
            tau_T = torch.full_like(ratio_T, tau_neg).masked_fill(advantages_T > 0, tau_pos)
            loss_T = -advantages_T * torch.sigmoid(tau_T * (ratio_T - 1)) * (4 / tau_T)
        case PolicyObjective.gmpo:
            lowest = -math.inf if clip_low is None else -clip_low
            upwards_T, downwards_T = advantages_T > 0, advantages_T < 0
            clipped_T = (upwards_T & (log_ratio_T > high)) | (downwards_T & (log_ratio_T < lowest))
            held_T = torch.where(clipped_T, log_ratio_T.clamp(lowest, high), log_ratio_T)
            loss_T = -advantages_T * _sequence_mean(held_T, mask_T, cu_seqlens).exp()
    if weight_T is not None:
        loss_T = loss_T * torch.where(mask_T, at_least_fp32(weight_T.detach()), 0)
    return PolicyLoss(loss_T, ratio_T.detach(), clipped_T.detach(), torch.zeros_like(mask_T), clamped_T)


def _sequence_mean(x_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The mean over each sequence's masked tokens, at all of its slots; `x_T` is 0 off the mask."""
    count_S = segment_sum(mask_T, cu_seqlens).clamp(min=1)
    return broadcast_to_tokens(segment_sum(x_T, cu_seqlens) / count_S, cu_seqlens)


def _check_settings(
    objective: PolicyObjective,
    clip_low: float | None,
    clip_high: float | None,
    dual_clip: float | None,
    tau_pos: float,
    tau_neg: float,
) -> None:
    for name, clip in (("clip_low", clip_low), ("clip_high", clip_high)):
        if clip is not None and not clip >= 0:
            raise ValueError(f"{name} must not be negative (None: no bound), found {clip}")
    if clip_low is not None and clip_low > 1 and objective is not PolicyObjective.gmpo:
        raise ValueError(f"clip_low must be in [0, 1] (None: no bound), found {clip_low}")
    if dual_clip is not None and not objective.has_dual_clip:
        raise ValueError(f"dual_clip={dual_clip:g} bounds the ratio of clip and gspo, but the objective is {objective}")
    if not (tau_pos > 0 and tau_neg > 0):
        raise ValueError(f"tau_pos and tau_neg must be positive, found {tau_pos} and {tau_neg}")

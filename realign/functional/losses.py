"""Per-token losses [T] that several algorithms share. They are 0 outside the mask.

Inputs outside the mask are ignored, including NaN and infinities: they affect neither values nor gradients. Only the
first argument is differentiable.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from .kl import LOG_RATIO_LIMIT, log_ratio
from .packed import at_least_fp32, broadcast_to_tokens, check_shapes, segment_sum


class PolicyLoss(NamedTuple):
    """A policy loss per token, and the inputs of its metrics."""

    loss_T: Tensor
    """Loss to minimize, differentiable."""
    ratio_T: Tensor
    """exp(logprobs - old), detached; exactly 1 outside the mask. The sequence's ratio in sequence objectives."""
    clipped_T: Tensor
    """bool: whether the clip is active. In `policy_loss`, such tokens have no gradient (larger clipped branch)."""
    dual_clipped_T: Tensor
    """bool: whether the dual clip bounds the loss, so that the token has no gradient."""
    clamped_T: Tensor
    """bool: whether the log-ratio exceeded `kl.LOG_RATIO_LIMIT`."""


class BehaviorWeights(NamedTuple):
    """Importance weights of tokens for the policy that sampled them."""

    weight_T: Tensor
    """Weights, detached; 0 where `keep_T` is False."""
    keep_T: Tensor
    """bool: the mask without the tokens that the bounds exclude. Use it as the mask of the loss."""
    clamped_T: Tensor
    """bool: whether a log-ratio behind the token's weight exceeded `kl.LOG_RATIO_LIMIT`; also of excluded tokens."""


class CapMode(StrEnum):
    """Handling of importance weights above the cap or below the floor."""

    mask = "mask"
    """Exclude their tokens from the loss and its denominator."""
    truncate = "truncate"
    """Clamp them to the bound."""


class ImportanceLevel(StrEnum):
    """Level at which importance weights are computed."""

    token = "token"
    """Per token: the ratio of the token's probabilities."""
    sequence = "sequence"
    """Per sequence: the product of its token ratios, which is the ratio of the sequence's probabilities."""
    geometric = "geometric"
    """Per sequence: the geometric mean of its token ratios, which does not grow with length."""


def policy_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Compute PPO's clipped loss, max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(logprobs - old).

    Source: arXiv:1707.06347 (eq. 7); asymmetric range: arXiv:2503.14476; dual clip: arXiv:1912.09729;
    decoupled objective: arXiv:2110.00641.

    Args:
        logprobs_T: [T] log-probs of the trained policy, differentiable.
        old_logprobs_T: [T] log-probs of the policy in the denominator of the ratio: the behavior policy in PPO, the
            proximal policy in decoupled PPO.
        advantages_T: [T].
        mask_T: [T] bool.
        clip_low: distance of the lower clip bound below 1, in [0, 1].
        clip_high: distance of the upper clip bound above 1, >= 0.
        dual_clip: c > 1: where A < 0, the loss is at most -A c. None means no bound.

    Raises:
        ValueError: a shape differs from the mask's, or a clip is out of range.
    """
    check_shapes(mask_T, advantages_T=advantages_T)
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(f"clip_low must be in [0, 1] and clip_high >= 0, found {clip_low} and {clip_high}")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1 (or None), found {dual_clip}")
    log_ratio_T, clamped_T = log_ratio(logprobs_T, old_logprobs_T, mask_T)
    ratio_T = log_ratio_T.exp()
    gain_T = torch.where(mask_T, -at_least_fp32(advantages_T.detach()), 0)
    free_T = gain_T * ratio_T
    held_T = gain_T * ratio_T.clamp(1 - clip_low, 1 + clip_high)
    # Inside the range both branches are equal, and `maximum` gives each half of the gradient. The clamp passes its half
    # on, so the sum is the whole gradient.
    loss_T = torch.maximum(free_T, held_T)
    dual_clipped_T = torch.zeros_like(mask_T)
    if dual_clip is not None:
        bound_T = gain_T * dual_clip
        dual_clipped_T = (gain_T > 0) & (loss_T > bound_T)
        loss_T = torch.where(dual_clipped_T, bound_T, loss_T)
    return PolicyLoss(
        torch.where(mask_T, loss_T, 0), ratio_T.detach(), (held_T > free_T).detach(), dual_clipped_T, clamped_T
    )


@torch.no_grad()
def behavior_weights(
    proximal_logprobs_T: Tensor,
    behavior_logprobs_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    *,
    floor: float | None = None,
    cap: float | None = None,
    mode: CapMode = CapMode.mask,
    level: ImportanceLevel = ImportanceLevel.token,
) -> BehaviorWeights:
    """Compute importance weights exp(proximal - behavior), which correct for sampling by another policy or engine.

    Source: decoupled PPO, arXiv:2110.00641. The cap is from AReaL, arXiv:2505.24298; masking on both sides is from
    IcePop, and truncation from TIS.

    Args:
        proximal_logprobs_T: [T] log-probs that the trainer recomputed before the update.
        behavior_logprobs_T: [T] log-probs that the sampler reported.
        mask_T: [T] bool.
        cu_seqlens: int32 [S+1].
        floor: lower bound on weights; None means no bound.
        cap: upper bound on weights; None means no bound.
        mode: handling of weights outside the bounds.
        level: one weight per token, or per sequence (the product or the geometric mean over its tokens in the mask).

    Returns:
        Weights, kept tokens and clamped tokens, each [T].

    Raises:
        ValueError: the cap is not positive, or the floor is not between 0 and the cap.
    """
    _check_bounds(floor, cap)
    log_weight_T, clamped_T = log_ratio(proximal_logprobs_T, behavior_logprobs_T, mask_T)
    if (level := ImportanceLevel(level)) is not ImportanceLevel.token:
        log_weight_S = segment_sum(log_weight_T, cu_seqlens)
        if level is ImportanceLevel.geometric:
            log_weight_S = log_weight_S / segment_sum(mask_T.to(log_weight_S.dtype), cu_seqlens).clamp(min=1)
        # A sum of clamped log-ratios can exceed the limit again.
        clamped_S = (log_weight_S.abs() > LOG_RATIO_LIMIT) | (segment_sum(clamped_T, cu_seqlens) > 0)
        clamped_T = mask_T & broadcast_to_tokens(clamped_S, cu_seqlens)
        log_weight_T = broadcast_to_tokens(log_weight_S.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), cu_seqlens)
    weight_T, keep_T = log_weight_T.exp(), mask_T
    if CapMode(mode) is CapMode.mask:
        # A NaN weight fails both comparisons, so it is kept and becomes visible in the loss.
        keep_T = mask_T & ~(weight_T > (math.inf if cap is None else cap)) & ~(weight_T < (floor or 0))
    elif (floor, cap) != (None, None):
        weight_T = weight_T.clamp(floor, cap)
    return BehaviorWeights(torch.where(keep_T, weight_T, 0), keep_T, clamped_T)


def nll_loss(logprobs_T: Tensor, mask_T: Tensor) -> Tensor:
    """Compute the negative log-likelihood of the tokens in the mask: [T] in nats. The supervised fine-tuning loss."""
    check_shapes(mask_T, logprobs_T=logprobs_T, mask_T=mask_T)
    return torch.where(mask_T, -at_least_fp32(logprobs_T), 0)


def _check_bounds(floor: float | None, cap: float | None) -> None:
    if cap is not None and not cap > 0:
        raise ValueError(f"cap must be positive (or None), found {cap}")
    if floor is not None and not 0 < floor <= (math.inf if cap is None else cap):
        raise ValueError(f"floor must be positive and at most the cap {cap} (or None), found {floor}")

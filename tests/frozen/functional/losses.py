"""Per-token losses: values [T] that are 0 off the mask, for `aggregation.aggregate` to sum.

Nothing off the mask, NaN and infinities included, has an effect on a value or a gradient. Only the first argument is
differentiated; whatever an update compares it with is data.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from .kl import LOG_RATIO_LIMIT, log_ratio
from .packed import at_least_fp32, broadcast_to_tokens, check_shapes, segment_sum

__all__ = [
    "CapMode",
    "ImportanceLevel",
    "PolicyLoss",
    "ValueLoss",
    "behaviour_weights",
    "nll_loss",
    "policy_loss",
    "value_loss",
]


class PolicyLoss(NamedTuple):
    """What `policy_loss` and `objectives.policy_objective` return: the loss, and what its metrics are made of."""

    loss_T: Tensor
    """To minimise; differentiable."""
    ratio_T: Tensor
    """exp(logprobs - old), detached; exactly 1 off the mask. In an objective of sequences, the sequence's."""
    clipped_T: Tensor
    """bool: the clip is at work. In `policy_loss`: the clipped branch is the larger, so this token has no gradient."""
    dual_clipped_T: Tensor
    """bool: the dual clip bounds the loss, so this token has no gradient."""
    clamped_T: Tensor
    """bool: the log-ratio was beyond `kl.LOG_RATIO_LIMIT`."""


class CapMode(StrEnum):
    """What happens to an importance weight above the cap or below the floor."""

    mask = "mask"
    """Its tokens leave the loss and its denominator."""
    truncate = "truncate"
    """It becomes the bound."""


class ImportanceLevel(StrEnum):
    """What one importance weight belongs to."""

    token = "token"
    """Each token has the ratio of its own probabilities."""
    sequence = "sequence"
    """All tokens of a sequence have the product of its tokens' ratios: the ratio of the sequence's probabilities."""
    geometric = "geometric"
    """All tokens of a sequence have the geometric mean of its tokens' ratios, which does not grow with length."""


class ValueLoss(StrEnum):
    """The error measure of the critic."""

    mse = "mse"
    """Half the squared error."""
    huber = "huber"
    """Half the squared error up to `huber_delta`, linear beyond."""


def policy_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    weight_T: Tensor | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate, max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(logprobs - old).

    Source: arXiv:1707.06347 (eq. 7); asymmetric range: arXiv:2503.14476; dual clip: arXiv:1912.09729;
    decoupled objective: arXiv:2110.00641.

    Args:
        logprobs_T: [T] of the policy that is trained; differentiable.
        old_logprobs_T: [T] of the policy that the ratio is taken against: the behaviour policy in PPO, the proximal
            one in decoupled PPO.
        advantages_T: [T].
        mask_T: [T] bool.
        clip_low: how far a ratio may fall below 1, in [0, 1].
        clip_high: how far it may rise above 1.
        dual_clip: c > 1; where A < 0 the loss is at most -A c. None: no bound.
        weight_T: [T] importance weights that multiply the loss (`behaviour_weights`); no gradient flows to them.

    Raises:
        ValueError: a shape differs from the mask's, or a clip is out of its range.
    """
    check_shapes(mask_T, advantages_T=advantages_T, weight_T=weight_T)
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(f"clip_low must be in [0, 1] and clip_high >= 0, found {clip_low} and {clip_high}")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1 (or None), found {dual_clip}")
    log_ratio_T, clamped_T = log_ratio(logprobs_T, old_logprobs_T, mask_T)
    ratio_T = log_ratio_T.exp()
    gain_T = torch.where(mask_T, -at_least_fp32(advantages_T.detach()), 0)
    free_T = gain_T * ratio_T
    held_T = gain_T * ratio_T.clamp(1 - clip_low, 1 + clip_high)
    loss_T = torch.maximum(free_T, held_T)
    dual_clipped_T = torch.zeros_like(mask_T)
    if dual_clip is not None:
        bound_T = gain_T * dual_clip
        dual_clipped_T = (gain_T > 0) & (loss_T > bound_T)
        loss_T = torch.where(dual_clipped_T, bound_T, loss_T)
    if weight_T is not None:
        loss_T = loss_T * torch.where(mask_T, at_least_fp32(weight_T.detach()), 0)
    return PolicyLoss(
        torch.where(mask_T, loss_T, 0), ratio_T.detach(), (held_T > free_T).detach(), dual_clipped_T, clamped_T
    )


@torch.no_grad()
def behaviour_weights(
    proximal_logprobs_T: Tensor,
    behaviour_logprobs_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    *,
    floor: float | None = None,
    cap: float | None = None,
    mode: CapMode = CapMode.mask,
    level: ImportanceLevel = ImportanceLevel.token,
) -> tuple[Tensor, Tensor]:
    """Importance weights exp(proximal - behaviour) that correct for tokens sampled by another policy or engine.

    Source: decoupled PPO, arXiv:2110.00641; capped as in AReaL, arXiv:2505.24298; masked on both sides as in IcePop,
    truncated as in TIS.

    Args:
        proximal_logprobs_T: [T], recomputed by the trainer before the update.
        behaviour_logprobs_T: [T], stated by the sampler.
        mask_T: [T] bool.
        cu_seqlens: int32 [S+1].
        floor: smallest weight that is trusted; None trusts all.
        cap: largest weight that is trusted; None trusts all.
        mode: what to do outside.
        level: one weight per token, or per sequence (the product or the geometric mean over its masked tokens).

    Returns:
        `weight_T`, 0 where `keep_T` is False, without gradient; and `keep_T` bool, the mask less what the bounds took
        out. Use `keep_T` as the mask of the loss **and** of its denominator.

    Raises:
        ValueError: the cap is not positive, or the floor is not between 0 and the cap.
    """
    _check_bounds(floor, cap)
    log_weight_T, _ = log_ratio(proximal_logprobs_T, behaviour_logprobs_T, mask_T)
    if (level := ImportanceLevel(level)) is not ImportanceLevel.token:
        log_weight_S = segment_sum(log_weight_T, cu_seqlens)
        if level is ImportanceLevel.geometric:
            log_weight_S = log_weight_S / segment_sum(mask_T.to(log_weight_S.dtype), cu_seqlens).clamp(min=1)
        log_weight_S = log_weight_S.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        log_weight_T = broadcast_to_tokens(log_weight_S, cu_seqlens)
    weight_T, keep_T = log_weight_T.exp(), mask_T
    if CapMode(mode) is CapMode.mask:
        # A weight that is not a number is neither above nor below: it stays, and shows in the loss.
        keep_T = mask_T & ~(weight_T > (math.inf if cap is None else cap)) & ~(weight_T < (floor or 0))
    elif (floor, cap) != (None, None):
        weight_T = weight_T.clamp(floor, cap)
    return torch.where(keep_T, weight_T, 0), keep_T


def value_loss(
    values_T: Tensor,
    old_values_T: Tensor,
    returns_T: Tensor,
    mask_T: Tensor,
    *,
    clip: float | None = None,
    kind: ValueLoss = ValueLoss.mse,
    huber_delta: float = 10.0,
) -> tuple[Tensor, Tensor]:
    """The critic's loss, max(e(v), e(clip(v, old - clip, old + clip))) with e half the squared error, or Huber's.

    Source: openai/lm-human-preferences (`vf_loss`); PPO2's clipped values.

    Args:
        values_T: [T] of the critic that is trained; differentiable.
        old_values_T: [T], its values when credit was assigned.
        returns_T: [T], its targets.
        mask_T: [T] bool.
        clip: how far a value may move from its old one, in units of reward; None: freely.
        kind: the error measure.
        huber_delta: the error from which Huber's grows linearly, in units of reward.

    Returns:
        `loss_T`, and `clipped_T` bool: the clipped branch is the larger, so this token has no gradient.

    Raises:
        ValueError: a shape differs from the mask's, or `clip` or `huber_delta` is not positive.
    """
    check_shapes(mask_T, values_T=values_T, old_values_T=old_values_T, returns_T=returns_T, mask_T=mask_T)
    if (clip is not None and not clip > 0) or not huber_delta > 0:
        raise ValueError(f"clip and huber_delta must be positive, found {clip} and {huber_delta}")
    new_T = torch.where(mask_T, at_least_fp32(values_T), 0)
    target_T = torch.where(mask_T, at_least_fp32(returns_T.detach()), 0)
    loss_T = _value_error(new_T - target_T, ValueLoss(kind), huber_delta)
    if clip is None:
        return loss_T, torch.zeros_like(mask_T)
    old_T = torch.where(mask_T, at_least_fp32(old_values_T.detach()), 0)
    # Clamping the value, not its step from the old one: inside the range the two branches are then equal to the bit.
    held_T = _value_error(new_T.clamp(old_T - clip, old_T + clip) - target_T, ValueLoss(kind), huber_delta)
    return torch.maximum(loss_T, held_T), (held_T > loss_T).detach()


def nll_loss(logprobs_T: Tensor, mask_T: Tensor) -> Tensor:
    """The negative log-likelihood of the masked tokens, [T] in nats; the loss of supervised fine-tuning."""
    check_shapes(mask_T, logprobs_T=logprobs_T, mask_T=mask_T)
    return torch.where(mask_T, -at_least_fp32(logprobs_T), 0)


def _check_bounds(floor: float | None, cap: float | None) -> None:
    if cap is not None and not cap > 0:
        raise ValueError(f"cap must be positive (or None), found {cap}")
    if floor is not None and not 0 < floor <= (math.inf if cap is None else cap):
        raise ValueError(f"floor must be positive and at most the cap {cap} (or None), found {floor}")


def _value_error(error_T: Tensor, kind: ValueLoss, huber_delta: float) -> Tensor:
    if kind is ValueLoss.mse:
        return error_T.square() / 2
    return torch.nn.functional.huber_loss(error_T, torch.zeros_like(error_T), reduction="none", delta=huber_delta)

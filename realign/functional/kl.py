"""KL estimators from sampled tokens.

The estimators of KL(policy || reference) from tokens sampled from the policy are those of
http://joschu.net/blog/kl-approx.html. Their values agree, but their gradients differ. The expected gradient of k1 is
0, so it is only useful as a reward. The gradient of k2 is that of KL(policy || reference), and the gradient of k3 is
that of KL(reference || policy). k1 and k3 times the differentiable ratio of the policy to the sampling one both have
the gradient of KL(policy || reference) (DeepSeek-V3.2, arXiv:2512.02556). `logprobs.vocabulary_divergence` computes the
exact KL over the vocabulary.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from .packed import at_least_fp32, check_shapes

LOG_RATIO_LIMIT = 20.0
"""Bound on the absolute value of log-ratios (nats), so that their exponentials do not overflow fp32."""


class KLEstimator(StrEnum):
    """A per-token estimate of KL(policy || reference), with d = logp - ref_logp."""

    k1 = "k1"
    """d: unbiased, may be negative."""
    k2 = "k2"
    """d**2 / 2: biased, never negative."""
    k3 = "k3"
    """exp(-d) - 1 + d: unbiased, never negative."""
    abs = "abs"
    """|d|: a symmetric penalty, not an estimate of the KL."""


def log_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor, mask_T: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the clamped `logprobs_T - old_logprobs_T` in the mask, and exactly 0 (a ratio of 1) outside it.

    Args:
        logprobs_T: [T], differentiable (no gradient where clamped). Values outside the mask are ignored, including
            NaN.
        old_logprobs_T: [T], detached.
        mask_T: [T] bool.

    Returns:
        The clamped log-ratio [T], fp32 (fp64 for fp64 input), and bool [T]: whether the clamp changed it.
    """
    check_shapes(mask_T, logprobs_T=logprobs_T, old_logprobs_T=old_logprobs_T, mask_T=mask_T)
    # Mask the inputs, not the result: a NaN off the mask would reach the gradient as 0 * NaN through a later exp.
    new_T = torch.where(mask_T, at_least_fp32(logprobs_T), 0)
    old_T = torch.where(mask_T, at_least_fp32(old_logprobs_T.detach()), 0)
    ratio_T = new_T - old_T
    return ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), ratio_T.detach().abs() > LOG_RATIO_LIMIT


def kl_estimate(logprobs_T: Tensor, ref_logprobs_T: Tensor, mask_T: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(policy || reference) at every token in the mask from the sampled token.

    Args:
        logprobs_T: [T] log-probs of the policy, differentiable. Values outside the mask are ignored, including NaN.
        ref_logprobs_T: [T] log-probs of the reference, detached.
        mask_T: [T] bool.
        estimator: the estimator.

    Returns:
        [T] in nats, 0 outside the mask.
    """
    d_T, _ = log_ratio(logprobs_T, ref_logprobs_T, mask_T)
    match KLEstimator(estimator):
        case KLEstimator.k1:
            return d_T
        case KLEstimator.k2:
            return d_T.square() / 2
        case KLEstimator.k3:
            # expm1, since exp(-d) - 1 + d cancels where d is near 0, as in the first steps of a run.
            return torch.expm1(-d_T) + d_T
        case KLEstimator.abs:
            return d_T.abs()

"""How far the policy has moved: sampled KL estimators, and the controllers that set the coefficient of a KL penalty.

The estimators are the ones of http://joschu.net/blog/kl-approx.html, of KL(policy || reference) from tokens sampled
from the policy. They agree in value, not in gradient: differentiated as they stand, k1 has expected gradient 0 (it only
serves as a reward), k2 has the gradient of KL(policy || reference) and k3 that of KL(reference || policy).
The exact KL over the whole vocabulary is `logprobs.exact_kl`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

import torch
from torch import Tensor

from .packed import at_least_fp32, check_shapes

__all__ = [
    "LOG_RATIO_LIMIT",
    "AdaptiveKLController",
    "FixedKLController",
    "KLController",
    "KLEstimator",
    "kl_estimate",
    "log_ratio",
]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to plus or minus this (nats), so that no exponential of one overflows fp32."""


class KLEstimator(StrEnum):
    """A per-token estimate of KL(policy || reference), with d = logp - ref_logp."""

    k1 = "k1"
    """d: unbiased, may be negative."""
    k2 = "k2"
    """d**2 / 2: biased, never negative."""
    k3 = "k3"
    """exp(-d) - 1 + d: unbiased, never negative."""
    abs = "abs"
    """|d|: not a KL; a symmetric penalty."""


def log_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor, mask_T: Tensor) -> tuple[Tensor, Tensor]:
    """`logprobs_T - old_logprobs_T` on the mask, clamped; exactly 0 off it, so that a ratio there is exactly 1.

    Args:
        logprobs_T: [T], differentiable (no gradient where clamped). Anything may stand off the mask, NaN included.
        old_logprobs_T: [T], no gradient flows to it.
        mask_T: [T] bool.

    Returns:
        The clamped log-ratio [T], fp32 (fp64 for fp64 input), and bool [T]: where the clamp changed it.
    """
    check_shapes(mask_T, logprobs_T=logprobs_T, old_logprobs_T=old_logprobs_T, mask_T=mask_T)
    new_T = torch.where(mask_T, at_least_fp32(logprobs_T), 0)
    old_T = torch.where(mask_T, at_least_fp32(old_logprobs_T.detach()), 0)
    ratio_T = new_T - old_T
    return ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), ratio_T.detach().abs() > LOG_RATIO_LIMIT


def kl_estimate(logprobs_T: Tensor, ref_logprobs_T: Tensor, mask_T: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(policy || reference) at every masked token from the token that was sampled there.

    Args:
        logprobs_T: [T] of the policy, differentiable. Anything may stand off the mask, NaN included.
        ref_logprobs_T: [T] of the reference, no gradient flows to it.
        mask_T: [T] bool.
        estimator: which one.

    Returns:
        [T] in nats, 0 off the mask.
    """
    d_T, _ = log_ratio(logprobs_T, ref_logprobs_T, mask_T)
    match KLEstimator(estimator):
        case KLEstimator.k1:
            return d_T
        case KLEstimator.k2:
            return d_T.square() / 2
        case KLEstimator.k3:
            return torch.expm1(-d_T) + d_T
        case KLEstimator.abs:
            return d_T.abs()


@dataclass
class FixedKLController:
    """A KL coefficient that stays as it is."""

    coef: float
    """Weight of the KL penalty, per nat."""

    @property
    def value(self) -> float:
        """The coefficient to use now."""
        return self.coef

    def update(self, kl: float, n_steps: int) -> None:
        """Nothing to learn from a measurement."""

    def state_dict(self) -> dict[str, float]:
        """Nothing that changes, so nothing to save."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Nothing to restore: the coefficient is the one of the configuration."""


@dataclass
class AdaptiveKLController:
    """A KL coefficient that is driven towards a target KL (Ziegler et al., arXiv:1909.08593, section 2.2)."""

    init: float
    """First coefficient, per nat."""
    target: float
    """KL per sequence to hold, in nats (6 in the source)."""
    horizon: float
    """Sequences over which an error of 100% would double the coefficient (10000 in the source)."""
    clip: float = 0.2
    """Largest relative error that one update reacts to (0.2 in the source)."""
    value: float = field(init=False)
    """The coefficient to use now."""

    def __post_init__(self) -> None:
        for name in ("target", "horizon"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} of an adaptive KL controller must be positive, found {getattr(self, name)}")
        self.value = self.init

    def update(self, kl: float, n_steps: int) -> None:
        """Move the coefficient: times `1 + clip(kl / target - 1) * n_steps / horizon`.

        Args:
            kl: mean over the sequences that trained of the KL summed over their tokens, in nats.
            n_steps: sequences since the last update; 0 changes nothing.

        Raises:
            ValueError: `kl` is not finite, or `n_steps` so far beyond `horizon` that the coefficient could become 0 or
                negative; either would destroy it for good.
        """
        if not math.isfinite(kl):
            raise ValueError(f"the KL given to the adaptive controller must be finite, found {kl}")
        if self.clip * n_steps >= self.horizon:
            raise ValueError(
                f"the horizon of the adaptive KL controller must be above {self.clip:g} x {n_steps} sequences of an "
                f"update, or the coefficient could become 0 or negative; found {self.horizon:g}"
            )
        error = min(max(kl / self.target - 1, -self.clip), self.clip)
        self.value *= 1 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        """The coefficient that has been reached."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a saved coefficient."""
        self.value = float(state["value"])


KLController: TypeAlias = FixedKLController | AdaptiveKLController

"""KL estimators from sampled tokens, and controllers for the coefficient of a KL penalty.

The estimators of KL(policy || reference) from tokens sampled from the policy are those of
http://joschu.net/blog/kl-approx.html. Their values agree, but their gradients differ. The expected gradient of k1 is
0, so it is only useful as a reward. The gradient of k2 is that of KL(policy || reference), and the gradient of k3 is
that of KL(reference || policy). k1 and k3 times the differentiable ratio of the policy to the sampling one both have
the gradient of KL(policy || reference) (DeepSeek-V3.2, arXiv:2512.02556). `divergence.vocabulary_divergence` computes
the exact KL over the vocabulary.
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
    "ThresholdKLController",
    "kl_estimate",
    "log_ratio",
]

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
            return torch.expm1(-d_T) + d_T
        case KLEstimator.abs:
            return d_T.abs()


@dataclass
class FixedKLController:
    """A constant KL coefficient."""

    coef: float
    """Weight of the KL penalty, per nat."""

    @property
    def value(self) -> float:
        """The current coefficient."""
        return self.coef

    def update(self, kl: float, n_steps: int) -> None:
        """Do nothing, since the coefficient is constant."""

    def state_dict(self) -> dict[str, float]:
        """Return an empty dict, since there is no state."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Do nothing, since the coefficient comes from the config."""


@dataclass
class AdaptiveKLController:
    """A KL coefficient adapted to reach a target KL (Ziegler et al., arXiv:1909.08593, section 2.2)."""

    init: float
    """Initial coefficient, per nat."""
    target: float
    """Target KL per sequence, in nats (6 in the source)."""
    horizon: float
    """Number of sequences over which an error of 100% would double the coefficient (10000 in the source)."""
    clip: float = 0.2
    """Bound on the relative error that one update uses (0.2 in the source)."""
    value: float = field(init=False)
    """The current coefficient."""

    def __post_init__(self) -> None:
        for name in ("target", "horizon"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, found {getattr(self, name)}")
        self.value = self.init

    def update(self, kl: float, n_steps: int) -> None:
        """Multiply the coefficient by `1 + clip(kl / target - 1) * n_steps / horizon`.

        Args:
            kl: KL summed over the tokens of a sequence, averaged over the trained sequences, in nats.
            n_steps: number of sequences since the last update; 0 changes nothing.

        Raises:
            ValueError: `kl` is not finite, or `clip * n_steps` is at least `horizon`, so that the coefficient could
                become 0 or negative.
        """
        if not math.isfinite(kl):
            raise ValueError(f"kl must be finite, found {kl}")
        if self.clip * n_steps >= self.horizon:
            raise ValueError(
                f"horizon must be above clip * n_steps = {self.clip:g} * {n_steps}, or the coefficient could become 0 "
                f"or negative. Found {self.horizon:g}"
            )
        error = min(max(kl / self.target - 1, -self.clip), self.clip)
        self.value *= 1 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the current coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a saved coefficient; the state of a constant coefficient leaves the initial one."""
        self.value = float(state.get("value", self.init))


@dataclass
class ThresholdKLController:
    """A coefficient that doubles or halves when the KL leaves a range around its target (PPO, arXiv:1707.06347, 4)."""

    init: float
    """Initial coefficient, per nat."""
    target: float
    """Target KL in nats (0.003 to 0.03 in the source)."""
    tolerance: float = 1.5
    """Factor by which the KL may be above or below the target without a change (1.5 in the source)."""
    bound: float = 2.0**20
    """Factor by which the coefficient stays within its initial value. The source has no bound."""
    value: float = field(init=False)
    """The current coefficient."""

    def __post_init__(self) -> None:
        for name in ("init", "target"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, found {getattr(self, name)}")
        self.value = self.init

    def update(self, kl: float) -> None:
        """Double the coefficient if `kl` is above the range, and halve it if `kl` is below.

        Args:
            kl: KL after the update, in nats.

        Raises:
            ValueError: `kl` is not finite.
        """
        if not math.isfinite(kl):
            raise ValueError(f"kl must be finite, found {kl}")
        if kl > self.target * self.tolerance:
            self.value = min(self.value * 2, self.init * self.bound)
        elif kl < self.target / self.tolerance:
            self.value = max(self.value / 2, self.init / self.bound)

    def state_dict(self) -> dict[str, float]:
        """Return the current coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a saved coefficient; the state of a constant coefficient leaves the initial one."""
        self.value = float(state.get("value", self.init))


KLController: TypeAlias = FixedKLController | AdaptiveKLController

"""Limits on how far a policy moves: a penalty for leaving the reference, bounds that end the learning from a batch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from realign.api import Stats, stat_values
from tests.frozen.functional import AdaptiveKLController, FixedKLController, KLEstimator


class KLPlace(StrEnum):
    """Where the penalty for leaving the reference policy is applied: once, never in both places."""

    none = "none"
    reward = "reward"
    loss = "loss"


@dataclass
class KLPenalty:
    """KL penalty against the reference policy."""

    place: KLPlace = KLPlace.none
    """none | reward (subtracted from every token's reward) | loss (added to the loss)."""
    coef: float = 0.05
    """Weight, in reward (or loss) per nat; the first one when `target` is set."""
    estimator: KLEstimator = KLEstimator.k1
    """k1 | k2 | k3 | abs, per token. In the loss k1 has an expected gradient of 0 and is refused."""
    target: float | None = None
    """Nats per sequence that the adaptive controller steers to; null keeps `coef` fixed (arXiv:1909.08593)."""
    horizon: int = 10_000
    """Sequences over which the adaptive controller corrects an error."""

    def __post_init__(self) -> None:
        if self.place is KLPlace.loss and self.estimator is KLEstimator.k1:
            raise ValueError("kl.estimator=k1 in the loss has an expected gradient of 0; choose k2 or k3")
        if not self.coef >= 0:
            raise ValueError(f"kl.coef must not be negative, found {self.coef}")
        if self.target is not None and self.place is KLPlace.none:
            raise ValueError(f"kl.target={self.target:g} steers a penalty that kl.place=none does not apply")
        if self.horizon < 1:
            raise ValueError(f"kl.horizon must be at least 1, found {self.horizon}")
        if self.target is not None and self.coef == 0:
            raise ValueError("kl.target multiplies kl.coef, and would leave a coefficient of 0 at 0; start above 0")

    def describe(self) -> str:
        """Where and how it is applied, for people."""
        if self.place is KLPlace.none:
            unread = self.coef != KLPenalty.coef
            return "not applied" + (f" (kl.coef={self.coef:g} is not read)" if unread else "")
        text = f"in the {self.place.value}, {self.estimator.value}, coefficient {self.coef:g}"
        if self.target is None:
            return text
        return f"{text} at first, steered to {self.target:g} nats per sequence over {self.horizon:,} sequences"

    def controller(self) -> FixedKLController | AdaptiveKLController:
        """The object that holds the coefficient."""
        if self.target is None:
            return FixedKLController(self.coef)
        return AdaptiveKLController(self.coef, self.target, self.horizon)


@dataclass
class EarlyStop:
    """Bounds on how far one rollout batch may move the policy.

    The mini-batch that is found beyond a bound makes no optimizer step (no weight, moment or schedule moves), and the
    rest of the batch's mini-batches and epochs are left out.
    """

    kl: float | None = None
    """Nats per token: bound on `approx_kl` (k3 of the old policy against the present one); null: none."""
    ratio: float | None = None
    """Bound on the mean probability ratio `ratio_mean` (realhf: 5); null: none."""

    def __post_init__(self) -> None:
        if self.kl is not None and not self.kl > 0:
            raise ValueError(f"early_stop.kl must be positive, or null, found {self.kl}")
        if self.ratio is not None and not self.ratio > 1:
            raise ValueError(f"early_stop.ratio must be above 1, or null, found {self.ratio}")

    @property
    def bounded(self) -> bool:
        """Whether there is a bound."""
        return (self.kl, self.ratio) != (None, None)

    def describe(self) -> str:
        """The bounds for people; empty without one."""
        bounds = {"approx_kl": self.kl, "ratio_mean": self.ratio}
        return " or ".join(f"{name} above {bound:g}" for name, bound in bounds.items() if bound is not None)

    def allows(self, stats: Stats) -> bool:
        """Whether the mini-batch with these metrics (over all ranks) may make its step."""
        if not self.bounded:
            return True  # without reading metrics, which waits for the device
        values = stat_values(stats)
        bounds = {"approx_kl": self.kl, "ratio_mean": self.ratio}
        return all(bound is None or values.get(name, 0.0) <= bound for name, bound in bounds.items())


__all__ = ["EarlyStop", "KLPenalty", "KLPlace"]

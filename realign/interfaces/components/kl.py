"""`KLPenalty`: penalty on the KL divergence from the reference policy, in the reward or in the loss.

A penalty of your own is a subclass with `estimate`. It works in both places, with every setting but `full_vocabulary`:

    class HingeKL(KLPenalty):
        def estimate(self, logprobs_T, ref_logprobs_T):
            return (logprobs_T - ref_logprobs_T - 0.1).clamp(min=0)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from realign.api import Max, Mean, ModelOutput, SequenceSample, Stats, masked_mean
from realign.errors import RunError, SettingsError
from realign.functional import (
    KLEstimator,
    Reduce,
    kl_estimate,
    log_ratio,
    segment_sum,
)
from realign.functional.packed import at_least_fp32
from realign.interfaces.components.scoring import old_logprobs
from realign.settings import Count, NonNegative, Positive, Settings


class KLPlace(StrEnum):
    """Where the KL penalty is applied: in the reward or in the loss, not in both."""

    none = "none"
    """No penalty; no reference model is loaded."""
    reward = "reward"
    """Subtracted from the reward of every token, before advantages are estimated."""
    loss = "loss"
    """Added to the loss of every token."""


@dataclass
class KLPenalty(Settings):
    """KL penalty against the reference policy."""

    place: KLPlace = KLPlace.none
    """Where to apply the penalty: none, reward or loss. With either of the last two, a reference model is loaded."""
    coef: NonNegative = 0.05
    """Weight of the penalty, in reward (or loss) per nat; with `target`, its initial value. 0 is the same as
    place=none: no reference model is loaded, and the KL isn't measured (1e-9 measures it)."""
    estimator: KLEstimator | None = None
    """How to estimate the KL of a token: k1, k2, k3 or abs. Unset: k1 in the reward, k3 in the loss. A class with its
    own `estimate` may ignore it."""
    full_vocabulary: bool = False
    """Compute the exact KL(policy || reference) over the whole vocabulary at every token, instead of an estimate from
    the sampled token (place=loss). The reference then returns its hidden states."""
    importance_weighted: bool = False
    """Multiply the penalty in the loss by the ratio of the current to the old policy, through which the gradient flows
    (DeepSeek-V3.2, arXiv:2512.02556; TRL's use_bias_correction_kl). With k1 or k3, the gradient is then that of the KL.
    """
    target: Positive | None = None
    """Adapt `coef` so that the KL per sequence stays near this, in nats (arXiv:1909.08593); null: `coef` is
    constant."""
    horizon: Count = 10_000
    """How fast `coef` adapts to `target`, in sequences; larger is slower."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.full_vocabulary and self._own_estimate:
            kind = type(self).__name__
            raise SettingsError(
                f"full_vocabulary=true: the exact KL would replace {kind}.estimate in the loss. Set "
                "full_vocabulary=false, or use KLPenalty"
            )
        unweighted = self.place is KLPlace.loss and not self.importance_weighted and not self._own_estimate
        if self.estimator is KLEstimator.k1 and unweighted:
            raise SettingsError(
                "estimator=k1: its expected gradient in the loss is 0. Set importance_weighted=true, estimator=k2 or "
                "estimator=k3"
            )
        if self.target is not None and self.coef == 0:
            raise SettingsError(
                "coef=0: the adaptive controller (target) multiplies coef, which would stay 0. Set coef above 0"
            )

    @override
    def ineffective(self) -> dict[str, str]:
        reasons: dict[str, str] = {}
        if self.place is not KLPlace.loss:
            elsewhere = f"with place={self.place.value}. Set place=loss"
            reasons |= {"full_vocabulary": elsewhere, "importance_weighted": elsewhere}
        elif self.full_vocabulary:
            exact = "with full_vocabulary=true, which is exact. Remove one of them"
            reasons |= {"estimator": exact, "importance_weighted": exact}
        if self.place is KLPlace.none:
            nothing = "with place=none. Set place=reward or place=loss"
            reasons |= {"target": nothing, "estimator": nothing}
            if self.coef > 0:  # coef=0 says the same as place=none, and is how other tools say it
                reasons["coef"] = nothing
        return reasons

    @property
    def applied(self) -> bool:
        """Whether there is a penalty. Without one, nothing needs the reference model."""
        return self.place is not KLPlace.none and self.coef > 0

    @property
    def _own_estimate(self) -> bool:
        """Whether a subclass replaces the estimators."""
        return type(self).estimate is not KLPenalty.estimate

    @property
    def chosen_estimator(self) -> KLEstimator:
        """The estimator in use; with `full_vocabulary` only for the metric and the target of whole sequences."""
        if self.estimator is not None:
            return self.estimator
        return KLEstimator.k3 if self.place is KLPlace.loss and not self.full_vocabulary else KLEstimator.k1

    def estimate(self, logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
        """Return [T] the KL of every token in nats, which `coef` multiplies. Override it for a penalty of your own.

        Rewards, the loss, metrics and the adaptive controller all use it. Called for several micro-batches at a time in
        threads, so it writes no shared state.

        Args:
            logprobs_T: [T] log-probs of the sampled tokens under the policy, differentiable in the loss; at least fp32.
            ref_logprobs_T: [T] log-probs under the reference. Both are 0 off the mask.
        """
        # `KLControl.estimate` masks before and after, so that an override does not have to.
        everywhere_T = torch.ones_like(logprobs_T, dtype=torch.bool)
        return kl_estimate(logprobs_T, ref_logprobs_T, everywhere_T, self.chosen_estimator)

    def control(self) -> KLControl:
        """Return a new `KLControl`, which applies the penalty and adapts the coefficient; the actor saves its state."""
        return KLControl(self)

    def needs(self) -> dict[str, str]:
        """Return keys that must be in the batch, with the setting that asks for each."""
        if not self.applied:
            return {}
        exact = {"ref_hidden": "kl.full_vocabulary=true"} if self.full_vocabulary else {}
        return {"ref_logprobs": f"kl.place={self.place.value}"} | exact

    def describe(self) -> str:
        """Return the penalty for the launch table."""
        if self.place is KLPlace.none:
            return "not applied"
        if not self.applied:
            return f"not applied, since kl.coef=0 (kl.place={self.place.value} is not read)"
        weighted = ", weighted by the policy ratio" if self.importance_weighted else ""
        kind = type(self).__name__ if self._own_estimate else self.chosen_estimator.value
        kind = "over the whole vocabulary" if self.full_vocabulary else kind
        text = f"in the {self.place.value}, {kind}{weighted}, coefficient {self.coef:g}"
        if self.target is None:
            return text
        return f"{text} at first, adapted to {self.target:g} nats per sequence over {self.horizon:,} sequences"


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


KLController: TypeAlias = FixedKLController | AdaptiveKLController


class KLControl:
    """The KL penalty of one interface, with its current coefficient."""

    def __init__(self, penalty: KLPenalty) -> None:
        self.penalty = penalty
        self.controller: KLController = FixedKLController(penalty.coef)
        if penalty.target is not None:
            self.controller = AdaptiveKLController(penalty.coef, penalty.target, penalty.horizon)

    @property
    def coef(self) -> float:
        """The current coefficient."""
        return self.controller.value

    def estimate(self, logprobs_T: Tensor, data: SequenceSample) -> Tensor:
        """Return [T] KL in nats of the policy with these log-probs against the reference, 0 off `loss_mask`.

        Raises:
            ValueError: `KLPenalty.estimate` returned another shape than [T].
        """
        mask_T = data["loss_mask"]

        def zero_outside(x_T: Tensor) -> Tensor:
            return torch.where(mask_T, at_least_fp32(x_T), 0)

        kl_T = self.penalty.estimate(zero_outside(logprobs_T), zero_outside(data["ref_logprobs"].detach()))
        if kl_T.shape != mask_T.shape:
            raise ValueError(
                f"{type(self.penalty).__qualname__}.estimate returned shape {list(kl_T.shape)}. It must return one "
                f"value per token, shape {list(mask_T.shape)}"
            )
        return torch.where(mask_T, kl_T, 0)

    def in_reward(self, data: SequenceSample) -> tuple[Tensor | None, float]:
        """Return [T] KL of the old policy and its price per nat, with place=reward; else None and 0."""
        if self.penalty.place is not KLPlace.reward or not self.penalty.applied:
            return None, 0.0
        return self.estimate(old_logprobs(data), data), self.coef

    @property
    def is_in_loss(self) -> bool:
        """Whether the penalty is a term of the loss."""
        return self.penalty.place is KLPlace.loss and self.penalty.applied

    def in_loss(
        self, output: ModelOutput, logprobs_T: Tensor, data: SequenceSample, temperature: float
    ) -> tuple[Tensor, Stats]:
        """Return [T] penalty to add to the loss, and its metric.

        Args:
            output: output of the policy.
            logprobs_T: log-probs of the policy.
            data: the micro-batch.
            temperature: temperature of the policy and the reference.
        """
        mask_T = data["loss_mask"]
        if self.penalty.full_vocabulary:
            # beta=1 is KL(policy || reference), the direction that the estimators estimate.
            kl_T = output.divergence("ref", data["ref_hidden"], beta=1.0, temperature=temperature, where_T=mask_T)
        else:
            kl_T = self.estimate(logprobs_T, data)
            if self.penalty.importance_weighted:  # the gradient flows through the ratio as well
                kl_T = log_ratio(logprobs_T, old_logprobs(data), mask_T)[0].exp() * kl_T
        return self.coef * kl_T, {"ref_kl": masked_mean(kl_T, mask_T)}

    def stats(self, data: SequenceSample) -> Stats:
        """Return metrics of a rollout batch: KL of the old policy against the reference."""
        if "ref_logprobs" not in data:
            return {}
        kl_T, mask_T, cu_seqlens = self.estimate(old_logprobs(data), data), data["loss_mask"], data.cu_seqlens()
        trained_S = segment_sum(mask_T, cu_seqlens) > 0
        in_reward = {"ref_kl": masked_mean(kl_T, mask_T)} if self.penalty.place is KLPlace.reward else {}
        return {"ref_kl_per_sequence": masked_mean(segment_sum(kl_T, cu_seqlens), trained_S), **in_reward}

    def update(self, stats: Stats, reduce: Reduce) -> Stats:
        """Adapt the coefficient to the KL per trained sequence; returns a metric with the old coefficient.

        Args:
            stats: metrics with `ref_kl_per_sequence` of this rank.
            reduce: sum over ranks.
        """
        if not self.penalty.applied:
            return {}
        metric: Stats = {"kl_coef": Max(torch.tensor(self.coef))}
        if self.penalty.target is not None:
            per_sequence = stats["ref_kl_per_sequence"]
            assert isinstance(per_sequence, Mean)
            sums = torch.stack([per_sequence.total.double(), per_sequence.weight.double()])
            # Over all ranks, so that the coefficient stays the same on each.
            kl, n_sequences = reduce(sums).tolist()
            if n_sequences:
                self._adapt(kl / n_sequences, int(n_sequences))
        return metric

    def _adapt(self, kl: float, n_sequences: int) -> None:
        """Update the controller.

        Raises:
            RunError: the KL is not finite.
            SettingsError: `kl.horizon` is too small for the number of sequences in a batch.
        """
        if not math.isfinite(kl):
            raise RunError(
                f"The KL to the reference policy is {kl} per sequence, so the coefficient cannot follow kl.target. "
                "Lower the learning rate, or set kl.target=null"
            )
        lowest = AdaptiveKLController.clip * n_sequences
        if self.penalty.horizon <= lowest:
            raise SettingsError(
                f"kl.horizon={self.penalty.horizon}: must be above {lowest:g} for a batch of {n_sequences} trained "
                "sequences, or the coefficient could become 0. Raise kl.horizon"
            )
        self.controller.update(kl, n_sequences)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the controller."""
        return dict(self.controller.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.controller.load_state_dict(state)

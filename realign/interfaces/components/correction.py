"""Off-policy corrections: tokens sampled by a policy or engine other than the policy at the start of the update.

Importance weights proximal / behavior (decoupled PPO, arXiv:2110.00641; AReaL, arXiv:2505.24298), truncated (TIS) and
masked (IcePop). The interface multiplies the objective's loss of a token by `weight_T`, so a correction is right for
every objective.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from realign.api import SequenceSample, Stats, masked_max, masked_mean
from realign.errors import SettingsError
from realign.functional import (
    BehaviorWeights,
    CapMode,
    ImportanceLevel,
    KLEstimator,
    behavior_weights,
    kl_estimate,
    sequence_index,
)
from realign.settings import Positive, Settings


class Corrected(NamedTuple):
    """Weights and masks of a correction for the tokens of a mini-batch."""

    weight_T: Tensor
    """[T] factor of the objective's loss, without gradient."""
    mask_T: Tensor
    """[T] bool: tokens that stay in the loss; a subset of `loss_mask`."""
    divisor_T: Tensor
    """[T] bool: tokens counted in the divisor of the loss."""


@dataclass
class Correction(Settings, ABC):
    """Base class. The weight of a token depends on its own sequence only, so cutting a batch does not change it."""

    @abstractmethod
    def correct(self, data: SequenceSample) -> Corrected:
        """Compute weights and masks of the tokens of a batch."""

    def needs(self) -> dict[str, str]:
        """Return keys that must be in the batch, with the setting that asks for each."""
        return {"prox_logprobs": "correction"}

    def stats(self, data: SequenceSample) -> Stats:
        """Return metrics of the rollout batch."""
        return {}

    @abstractmethod
    def describe(self) -> str:
        """Return the correction for the launch table."""


@dataclass
class RatioRange(Settings):
    """A range of ratios proximal / behavior."""

    level: ImportanceLevel = ImportanceLevel.token
    """token: of each token; sequence: product over the response; geometric: geometric mean over the response."""
    floor: Positive | None = None
    """Lower end; null: none."""
    cap: Positive | None = None
    """Upper end; null: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.floor is not None and self.cap is not None and self.floor > self.cap:
            raise SettingsError(f"floor={self.floor:g}: must be at most cap={self.cap:g}")

    @property
    def bounded(self) -> bool:
        """Whether the range has an end."""
        return (self.floor, self.cap) != (None, None)

    def apply(self, data: SequenceSample, mode: CapMode) -> BehaviorWeights:
        """Return the ratios at this level, and the tokens that the range keeps; see `behavior_weights`."""
        return behavior_weights(
            data["prox_logprobs"],
            data["logprobs"],
            data["loss_mask"],
            data.cu_seqlens(),
            floor=self.floor,
            cap=self.cap,
            mode=mode,
            level=self.level,
        )

    def describe(self) -> str:
        """Return the range for the launch table, such as `token ratio in [0.5, 5]`."""
        if not self.bounded:
            return f"{self.level.value} ratio, unbounded"
        ends = ["0" if self.floor is None else f"{self.floor:g}", "inf" if self.cap is None else f"{self.cap:g}"]
        return f"{self.level.value} ratio in [{', '.join(ends)}]"


@dataclass
class ImportanceCorrection(Correction):
    """Weight the loss of every token by proximal / behavior, truncated to a range; mask tokens outside another range.

    Example: `ImportanceCorrection(weight=RatioRange(cap=2))` is truncated importance sampling;
    `ImportanceCorrection(rejection=RatioRange(floor=0.5, cap=5))` is IcePop. By default, weights are at most 5: the
    cap of AReaL (which rejects such tokens) and of OpenRLHF's TIS.
    """

    weight: RatioRange = field(default_factory=lambda: RatioRange(cap=5.0))
    """The importance weight; a ratio outside the range becomes the nearest end (TIS). `weight.cap=null`: no bound."""
    rejection: RatioRange | None = None
    """Tokens (at other levels: responses) whose ratio is outside are masked (AReaL's behav_imp_weight_cap); null:
    none."""
    keep_in_divisor: bool = False
    """Count rejected tokens in the divisor of the loss (AReaL, TRL, NeMo-RL), so that rejections shrink the step."""

    @override
    def ineffective(self) -> dict[str, str]:
        if self.rejection is None:
            return {"keep_in_divisor": "without rejection. Set rejection.cap or rejection.floor"}
        unbounded = "without a bound. Set rejection.floor or rejection.cap"
        return {} if self.rejection.bounded else {"rejection": unbounded}

    @override
    def correct(self, data: SequenceSample) -> Corrected:
        weight_T, keep_T = self.weight.apply(data, CapMode.truncate).weight_T, self._keep_mask(data)
        return Corrected(weight_T, keep_T, data["loss_mask"] if self.keep_in_divisor else keep_T)

    @override
    def stats(self, data: SequenceSample) -> Stats:
        """Return differences to the behavior policy, weights, and fractions of tokens that are changed."""
        mask_T, keep_T = data["loss_mask"], self._keep_mask(data)
        # Without bounds, to see below which weights the range has changed.
        ratio_T, _, clamped_T = RatioRange(self.weight.level).apply(data, CapMode.truncate)
        weight_T = self.weight.apply(data, CapMode.truncate).weight_T
        kl_T = kl_estimate(data["logprobs"], data["prox_logprobs"], mask_T, KLEstimator.k3)
        stats: Stats = {
            "behavior_kl": masked_mean(kl_T, mask_T),
            "behavior_logprob_diff_max": masked_max((data["prox_logprobs"] - data["logprobs"]).abs(), mask_T),
            "behavior_weight_mean": masked_mean(weight_T, keep_T),
            "behavior_weight_max": masked_max(weight_T, keep_T),
            "behavior_clamped_fraction": masked_mean(clamped_T.float(), mask_T),
        }
        if self.weight.bounded:
            stats["behavior_truncated_fraction"] = masked_mean((weight_T != ratio_T).float(), keep_T)
        if self.rejection is not None:
            stats["behavior_rejected_fraction"] = masked_mean((~keep_T).float(), mask_T)
        return stats

    @override
    def describe(self) -> str:
        text = f"weight: {self.weight.describe()}"
        if self.rejection is None:
            return text
        divisor = "all tokens" if self.keep_in_divisor else "kept tokens"
        return f"{text}; kept: {self.rejection.describe()}; divided by {divisor}"

    def _keep_mask(self, data: SequenceSample) -> Tensor:
        return (self.rejection or RatioRange()).apply(data, CapMode.mask).keep_T


def staleness_stats(data: SequenceSample, version: int) -> Stats:
    """Return the staleness of the oldest and the newest token of a response, in training steps relative to `version`.

    Args:
        data: batch with `versions` [T], -1 for prompt tokens.
        version: training steps of the policy that is about to be trained.
    """
    sampled_T, index_T = data["versions"] >= 0, sequence_index(data.cu_seqlens())
    lag_T = version - data["versions"].long()
    nothing_S = torch.full((len(data.cu_seqlens()) - 1,), -1, device=lag_T.device)
    oldest_S = nothing_S.scatter_reduce(0, index_T[sampled_T], lag_T[sampled_T], "amax")
    # Unlike the maximum, the minimum must ignore the fill of -1; it remains for responses without a sampled token.
    newest_S = nothing_S.scatter_reduce(0, index_T[sampled_T], lag_T[sampled_T], "amin", include_self=False)
    return {
        "staleness_head": masked_mean(oldest_S.float(), oldest_S >= 0),
        "staleness_tail": masked_mean(newest_S.float(), oldest_S >= 0),
        "staleness_max": masked_max(oldest_S, oldest_S >= 0),
    }

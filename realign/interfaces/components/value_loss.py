"""Value loss, and helpers shared by critics and actors with a value head."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor
from typing_extensions import override

from realign.api import Mean, Model, Panel, SequenceSample, Stats, masked_mean
from realign.functional import segment_sum
from realign.functional.packed import at_least_fp32, check_shapes
from realign.settings import Positive, Settings


class Critic(StrEnum):
    """The model that estimates values for an actor."""

    none = "none"
    """No critic: values are 0."""
    own = "own"
    """The role `critic`, a separate model that is trained beside the actor."""
    shared = "shared"
    """The role `critic` is a view of the actor's value head, which the actor's loss trains (`value`)."""


class ValueLoss(StrEnum):
    """Error function of the critic."""

    mse = "mse"
    """Half the squared error."""
    huber = "huber"
    """Half the squared error up to `huber_delta`, linear above it."""


def value_loss(
    values_T: Tensor,
    old_values_T: Tensor,
    returns_T: Tensor,
    mask_T: Tensor,
    *,
    clip: float | None,
    kind: ValueLoss,
    huber_delta: float,
) -> tuple[Tensor, Tensor]:
    """Compute the critic's loss, max(e(v), e(clip(v, old - clip, old + clip))), e half the squared or Huber error.

    Source: openai/lm-human-preferences (`vf_loss`); PPO2's clipped values.

    Args:
        values_T: [T] values of the trained critic, differentiable.
        old_values_T: [T] values used in advantage estimation.
        returns_T: [T] returns, the regression targets.
        mask_T: [T] bool.
        clip: maximum change of a value from its old value, in units of reward; None means no limit.
        kind: the error function.
        huber_delta: error above which the Huber error is linear, in units of reward.

    Returns:
        `loss_T`, and `clipped_T` bool: whether the clipped branch is larger, so that the token has no gradient.

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
    # Clamp the value, not its change: inside the range, both branches are then bitwise equal.
    held_T = _value_error(new_T.clamp(old_T - clip, old_T + clip) - target_T, ValueLoss(kind), huber_delta)
    return torch.maximum(loss_T, held_T), (held_T > loss_T).detach()


def _value_error(error_T: Tensor, kind: ValueLoss, huber_delta: float) -> Tensor:
    if kind is ValueLoss.mse:
        return error_T.square() / 2
    return torch.nn.functional.huber_loss(error_T, torch.zeros_like(error_T), reduction="none", delta=huber_delta)


@dataclass
class ValueObjective(Settings):
    """The loss of values: half the squared error, or Huber's; clipped as in PPO2."""

    clip: Positive | None = 0.2
    """Largest change of a value from its old one, in units of the network's output; null: no limit."""
    kind: ValueLoss = ValueLoss.mse
    """Error measure: mse or huber."""
    huber_delta: Positive = 10.0
    """Error from which Huber's loss grows linearly (kind=huber)."""
    coef: Positive = 1.0
    """Weight of the value loss when it is added to the loss of a policy with the same trunk."""

    @override
    def ineffective(self) -> dict[str, str]:
        unused = f"with kind={self.kind.value}. Set kind=huber"
        return {} if self.kind is ValueLoss.huber else {"huber_delta": unused}

    def describe(self) -> str:
        """Return the loss for the launch table, without `coef`."""
        kind = self.kind.value if self.kind is ValueLoss.mse else f"huber beyond {self.huber_delta:g}"
        return kind if self.clip is None else f"{kind}, clipped at {self.clip:g} from the old value"

    def __call__(self, values_T: Tensor, minibatch: SequenceSample) -> tuple[Tensor, Stats]:
        """Return [T] loss of every token of `loss_mask`, without `coef`; and its metrics.

        Args:
            values_T: [T] differentiable.
            minibatch: has `loss_mask`, `values` (the old ones) and `returns`.
        """
        mask_T, returns_T = minibatch["loss_mask"], minibatch["returns"]
        loss_T, clipped_T = value_loss(
            values_T,
            minibatch["values"],
            returns_T,
            mask_T,
            clip=self.clip,
            kind=self.kind,
            huber_delta=self.huber_delta,
        )
        return loss_T, {
            "value_loss": masked_mean(loss_T, mask_T),
            "value_clip_fraction": masked_mean(clipped_T, mask_T),
            "value_mean": masked_mean(values_T, mask_T),
            "value_error": masked_mean((values_T - returns_T).square(), mask_T),
        }


def select_trained(data: SequenceSample) -> SequenceSample:
    """Return the sequences with a token in `loss_mask`; the others would only cost a forward pass.

    A batch without any such sequence is returned unchanged, so that the engine counts the skipped step.
    """
    trains_S = segment_sum(data["loss_mask"], data.cu_seqlens()) > 0
    if bool(trains_S.all()) or not bool(trains_S.any()):
        return data
    return data.take_sequences(trains_S.nonzero()[:, 0].tolist())


def value_stats(data: SequenceSample, model: Model) -> Stats:
    """Return metrics of the old values: means, standard deviations, explained variance of returns."""
    mask_T = data["loss_mask"]
    returns_M, values_M = data["returns"][mask_T].double(), data["values"][mask_T].double()
    reduce = model.engine.reduce
    sums = torch.stack([returns_M.new_tensor(len(returns_M)), returns_M.sum(), values_M.sum()])
    count, total, value_total = reduce(sums).unbind()
    n = count.clamp(min=1)
    # Around the means of all ranks, hence a second sum; a single pass over squares would cancel.
    deviations = returns_M - total / n, values_M - value_total / n, returns_M - values_M
    spread, value_spread, error = reduce(torch.stack([x.square().sum() for x in deviations])).tolist()
    stats: Stats = {
        "return_mean": masked_mean(data["returns"], mask_T),
        "old_value_mean": masked_mean(data["values"], mask_T),
    }
    if count > 0:
        stats["return_std"] = number(math.sqrt(spread / float(n)))
        stats["old_value_std"] = number(math.sqrt(value_spread / float(n)))
    if spread > 0:
        stats["explained_variance"] = number(1 - error / spread)
    return stats


def number(x: float) -> Mean:
    """Return a metric with a single value."""
    return Mean(torch.tensor(float(x)), torch.ones(()))


VALUE_PANELS = (
    Panel("explained variance of returns", {"explained_variance": "values"}),
    Panel("value loss", {"value_loss": "values"}),
)
"""Charts of the metrics of values."""

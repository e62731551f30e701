"""The critic of PPO: what a state is worth, learned from the returns that the actor's credit gives.

Inference reads `input_ids`, `loss_mask`; writes `values` [T] (of the state before each token) and `bootstrap_values`
[S] (of the state after a sequence's last token). Training reads `values` as they were then, `returns`, and as
`loss_mask` the tokens that train (`train_mask` of the graph). It knows nothing of gamma, KL or reward shaping: credit
is assigned once, by the actor (`PPOActorInterface.credit`).

With `normalization` the network's outputs are in units of running moments of the returns; values leave the interface
in units of reward, so the actor does not know of it. The moments belong to the weights and are kept with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from realign.api import (
    Keys,
    Mean,
    MicroBatchSpec,
    Model,
    ModelInterface,
    ModelOutput,
    Panel,
    Plan,
    SequenceSample,
    Stats,
    masked_mean,
    merge_stats,
)
from realign.functional import (
    Aggregation,
    MomentsKind,
    RunningMoments,
    ValueLoss,
    aggregate,
    aggregation_weight,
    segment_sum,
    value_loss,
)
from realign.settings import Count, NonNegative, Positive, Range, Settings


@dataclass
class ValueObjective(Settings):
    """The loss of values: half the squared error, or Huber's; clipped as in PPO2."""

    clip: Positive | None = 0.2
    """How far a value may move from its old one (units of the network's output); null: freely."""
    kind: ValueLoss = ValueLoss.mse
    """mse | huber."""
    huber_delta: Positive = 10.0
    """Error from which Huber's loss grows linearly."""
    coef: Positive = 1.0
    """Weight of the loss, where it is added to that of a policy with the same trunk."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind is not ValueLoss.huber and self.huber_delta != ValueObjective.huber_delta:
            raise ValueError(f"the value objective's huber_delta={self.huber_delta:g} has no effect with kind=mse")

    def describe(self) -> str:
        """The loss for people, without `coef`."""
        kind = self.kind.value if self.kind is ValueLoss.mse else f"huber beyond {self.huber_delta:g}"
        return kind if self.clip is None else f"{kind}, clipped at {self.clip:g} from the old value"

    def __call__(self, values_T: Tensor, minibatch: SequenceSample) -> tuple[Tensor, Stats]:
        """[T] loss of every token of `loss_mask`, without `coef`; and its metrics.

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


class ValueScale(StrEnum):
    """Which moments of the returns the outputs of a critic are in units of."""

    none = "none"
    """None: outputs are values."""
    exponential = "exponential"
    """Means of returns and of their squares that forget at a constant rate, free of the bias of their start at 0."""
    cumulative = "cumulative"
    """Mean and deviation of all returns so far."""


@dataclass
class ValueNormalization(Settings):
    """Running moments of the returns."""

    scale: ValueScale = ValueScale.none
    """none | exponential | cumulative."""
    beta: Annotated[float, Range(ge=0, lt=1)] = 0.99
    """Of scale=exponential: what is kept of the moments at each training step (realhf: 0.99995)."""
    eps: NonNegative = 1e-5
    """Added to the deviation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale is not ValueScale.exponential and self.beta != ValueNormalization.beta:
            raise ValueError(f"normalization.beta={self.beta:g} has no effect with scale={self.scale.value}")
        if self.scale is ValueScale.none and self.eps != ValueNormalization.eps:
            raise ValueError(f"normalization.eps={self.eps:g} has no effect with scale=none")

    def moments(self) -> RunningMoments | None:
        """The object that keeps them; mean 0 and deviation 1 until the first training step."""
        if self.scale is ValueScale.none:
            return None
        return RunningMoments(MomentsKind(self.scale.value), beta=self.beta, eps=self.eps)


@dataclass
class PPOCriticInterface(ModelInterface):
    """A model with head=value (or a view of an actor with a value head) that learns the returns.

    It deals prompts into mini-batches of its own, not the actor's, and an early stop of the actor does not stop it.
    """

    epochs: Count = 1
    """Passes over the rollout batch."""
    n_minibatches: Count = 1
    """Optimizer steps per pass; prompts are dealt out anew in each."""
    objective: ValueObjective = field(default_factory=ValueObjective)
    """Error measure and clip."""
    normalization: ValueNormalization = field(default_factory=ValueNormalization)
    """Running normalisation of the values."""
    aggregation: Aggregation = Aggregation.token_mean
    """How tokens and sequences weigh in the loss; constant is not for critics."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.objective.coef != 1:
            raise ValueError(
                f"objective.coef={self.objective.coef:g} weighs the loss of values against a policy's; a critic of its "
                "own has no other loss: use its optimizer's lr"
            )
        if self.aggregation is Aggregation.constant:
            raise ValueError(
                "aggregation=constant has no number of tokens here; choose a mean over tokens or sequences"
            )
        self.moments = self.normalization.moments()

    def keys(self, method: str) -> Keys:
        """See `ModelInterface.keys`."""
        scored = {"input_ids": "", "loss_mask": ""}
        if method == "inference":
            return Keys(needs=scored, writes=frozenset({"values", "bootstrap_values"}))
        return Keys(needs=scored | {"values": "", "returns": ""}) if method == "train_step" else Keys()

    def outputs(self) -> frozenset[str]:
        """See `ModelInterface.outputs`."""
        return frozenset({"values", "scores"})

    def plan(self) -> Plan:
        """See `ModelInterface.plan`."""
        return Plan(epochs=self.epochs, n_minibatches=self.n_minibatches)

    def headline(self) -> tuple[str, ...]:
        """See `ModelInterface.headline`."""
        return ("explained_variance", "value_loss")

    def panels(self) -> tuple[Panel, ...]:
        """See `ModelInterface.panels`."""
        return (
            Panel("explained variance of returns", {"explained_variance": "critic"}),
            Panel("value loss", {"value_loss": "critic"}),
        )

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """`values` [T] of the state before each token, `bootstrap_values` [S] of the state after the last one."""

        def post_hook(output: ModelOutput, mb: SequenceSample) -> SequenceSample:
            values_T = torch.where(mb["loss_mask"], self._outward(output.values()), 0)
            return mb.with_tokens(values=values_T).with_sequences(bootstrap_values=self._outward(output.scores()))

        return model.machine.forward(data.select(["input_ids", "loss_mask"]), mb_spec, post_hook)

    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> Stats:
        """Take `epochs * n_minibatches` optimizer steps towards `returns`, shuffled anew in each pass."""
        stats: list[Stats] = [value_stats(data, model)]
        data = self._inward(model, trained(data))
        rng = np.random.default_rng(model.call_seed("minibatches"))
        for _ in range(self.epochs):
            for part in data.minibatches(self.n_minibatches, rng):
                stats.append(model.machine.train_batch(part, mb_spec, self.loss, self.loss_weight))
        if self.moments is not None:
            stats.append(
                {"return_moment_mean": _number(self.moments.mean), "return_moment_std": _number(self.moments.std)}
            )
        return merge_stats(stats)

    def loss(self, output: ModelOutput, minibatch: SequenceSample) -> tuple[Tensor, Stats]:
        """The aggregated sum of value losses, in the units of the network."""
        loss_T, stats = self.objective(output.values(), minibatch)
        return aggregate(loss_T, minibatch["loss_mask"], minibatch.cu_seqlens(), self.aggregation), stats

    def loss_weight(self, data: SequenceSample) -> Tensor:
        """What the engine divides the sum by."""
        return aggregation_weight(data["loss_mask"], data.cu_seqlens(), self.aggregation)

    def _outward(self, x: Tensor) -> Tensor:
        return x if self.moments is None else self.moments.denormalize(x)

    def _inward(self, model: Model, data: SequenceSample) -> SequenceSample:
        """Old values and returns in the network's units: the old ones as it gave them, the new ones as it shall."""
        if self.moments is None:
            return data
        mask_T, returns_T = data["loss_mask"], data["returns"]
        values_T = torch.where(mask_T, self.moments.normalize(data["values"]), 0)
        self.moments.update(returns_T, mask_T, model.machine.reduce)
        returns_T = torch.where(mask_T, self.moments.normalize(returns_T), 0)
        return data.with_tokens(values=values_T, returns=returns_T)

    def state_dict(self) -> dict[str, Any]:
        """The moments of the returns, where they are kept."""
        return {} if self.moments is None else {"moments": self.moments.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back the moments."""
        if self.moments is not None:
            self.moments.load_state_dict(state["moments"])

    def adopt(self, saved: Mapping[str, Any]) -> None:
        """Take the moments that the weights were trained with.

        Raises:
            ValueError: the weights were trained with moments, and `normalization` asks for none.
        """
        if "moments" not in saved:
            return
        if self.moments is None:
            raise ValueError(
                "the critic's weights were trained with running normalisation, so its outputs are no values; set "
                "normalization.scale as it was then"
            )
        self.moments.load_state_dict(saved["moments"])

    def describe(self, batch_prompts: int) -> dict[str, str]:
        """See `ModelInterface.describe`."""
        return {
            "loss": f"{self.objective.describe()}, {self.aggregation.value}",
            "value normalisation": self.normalization.scale.value,
        }


def trained(data: SequenceSample) -> SequenceSample:
    """Only the sequences with a token in `loss_mask`: the others would cost a pass and change nothing.

    A batch without any is left as it is, for the engine to count the step that it does not make.
    """
    trains_S = segment_sum(data["loss_mask"], data.cu_seqlens()) > 0
    if bool(trains_S.all()) or not bool(trains_S.any()):
        return data
    return data.take_sequences(trains_S.nonzero()[:, 0].tolist())


def value_stats(data: SequenceSample, model: Model) -> Stats:
    """Metrics of values when credit was assigned: means, deviations, and how much of the returns they explain."""
    mask_T = data["loss_mask"]
    returns_M, values_M = data["returns"][mask_T].double(), data["values"][mask_T].double()
    reduce = model.machine.reduce
    sums = torch.stack([returns_M.new_tensor(len(returns_M)), returns_M.sum(), values_M.sum()])
    count, total, value_total = reduce(sums).unbind()
    n = count.clamp(min=1)
    deviations = returns_M - total / n, values_M - value_total / n, returns_M - values_M
    spread, value_spread, error = reduce(torch.stack([x.square().sum() for x in deviations])).tolist()
    stats: Stats = {
        "return_mean": masked_mean(data["returns"], mask_T),
        "old_value_mean": masked_mean(data["values"], mask_T),
    }
    if count > 0:
        stats["return_std"] = _number(math.sqrt(spread / float(n)))
        stats["old_value_std"] = _number(math.sqrt(value_spread / float(n)))
    if spread > 0:
        stats["explained_variance"] = _number(1 - error / spread)
    return stats


def _number(x: float) -> Mean:
    return Mean(torch.tensor(float(x)), torch.ones(()))


__all__ = ["PPOCriticInterface", "ValueNormalization", "ValueObjective", "ValueScale", "trained", "value_stats"]

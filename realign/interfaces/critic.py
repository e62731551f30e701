"""The critic of PPO: a value model, trained on the returns from the actor's advantage estimation.

Inference reads `input_ids` and `loss_mask`. It writes `values` [T] (of the state before each token) and
`bootstrap_values` [S] (of the state after a sequence's last token). Training reads the old `values`, `returns`, and
`loss_mask`, the tokens to train on (`train_mask` of the graph). The critic does not use gamma, KL or reward shaping:
the actor estimates advantages and returns once for both (`PPOActorInterface.credit`).

With `normalization` the network's outputs are normalized by running moments of the returns. The interface converts them
back, so the actor always sees values in units of reward. The moments are saved with the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from realign.api import (
    Keys,
    MicroBatchSpec,
    Model,
    ModelInterface,
    ModelOutput,
    Plan,
    SequenceSample,
    Stats,
    merge_stats,
)
from realign.api.router_experts import ROUTER_EXPERTS
from realign.errors import ConfigError, SettingsError
from realign.functional import MomentsKind, RunningMoments
from realign.interfaces.components import Aggregation, TokenMean, ValueObjective, select_trained, value_stats
from realign.interfaces.components.scoring import forward_inputs
from realign.interfaces.components.value_loss import VALUE_PANELS, number
from realign.settings import Count, NonNegative, Range, Settings


class ValueScale(StrEnum):
    """Running moments of the returns that normalize the outputs of a critic."""

    none = "none"
    """No normalization: outputs are values."""
    exponential = "exponential"
    """Exponential moving averages of the returns and their squares, with bias correction as in Adam."""
    cumulative = "cumulative"
    """Mean and standard deviation of all returns so far."""


@dataclass
class ValueNormalization(Settings):
    """Normalization of the values by running moments of the returns."""

    scale: ValueScale = ValueScale.none
    """Kind of running moments: none, exponential or cumulative."""
    beta: Annotated[float, Range(ge=0, lt=1)] = 0.99
    """Decay of the moments per training step with scale=exponential (realhf: 0.99995)."""
    eps: NonNegative = 1e-5
    """Epsilon added to the standard deviation."""

    @override
    def ineffective(self) -> dict[str, str]:
        reasons = {}
        if self.scale is not ValueScale.exponential:
            reasons["beta"] = f"with scale={self.scale.value}. Set scale=exponential"
        if self.scale is ValueScale.none:
            reasons["eps"] = "with scale=none. Set scale=exponential or scale=cumulative"
        return reasons

    def moments(self) -> RunningMoments | None:
        """Create the running moments: mean 0 and standard deviation 1 until the first training step."""
        if self.scale is ValueScale.none:
            return None
        return RunningMoments(MomentsKind(self.scale.value), beta=self.beta, eps=self.eps)


@dataclass
class PPOCriticInterface(ModelInterface):
    """A model with head=value (or a view of an actor with a value head) that learns the returns.

    Its mini-batches differ from the actor's, and an early stop of the actor does not stop the critic.
    """

    KEYS: ClassVar = {
        # a critic that shares the actor's model also replays the experts of the rollout, as the actor's loss does
        "inference": Keys(
            {"input_ids": "", "loss_mask": ""}, frozenset({ROUTER_EXPERTS}), frozenset({"values", "bootstrap_values"})
        ),
        "train_step": Keys({"input_ids": "", "loss_mask": "", "values": "", "returns": ""}),
    }
    OUTPUTS = frozenset({"values", "scores"})
    HEADLINE = ("explained_variance", "value_loss")
    PANELS = VALUE_PANELS

    epochs: Count = 1
    """How often to train on each rollout batch."""
    n_minibatches: Count = 1
    """Optimizer steps per pass. Each pass shuffles the prompts."""
    objective: ValueObjective = field(default_factory=ValueObjective)
    """Error measure and clipping of the value loss."""
    normalization: ValueNormalization = field(default_factory=ValueNormalization)
    """Normalization of the values by running moments of the returns."""
    aggregation: Aggregation = field(default_factory=TokenMean)
    """How to average the loss over tokens and sequences: token_mean, seq_mean_token_mean, seq_mean_token_sum or
    constant."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.objective.coef != 1:
            raise SettingsError(
                f"objective.coef={self.objective.coef:g}: a separate critic has only this loss, so the coefficient "
                "would only scale its learning rate. Set optimizer.lr of its model instead"
            )
        self.moments = self.normalization.moments()

    @override
    def plan(self) -> Plan:
        return Plan(epochs=self.epochs, n_minibatches=self.n_minibatches)

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Compute `values` [T] of the states before each token and `bootstrap_values` [S] of the final states."""

        def post_hook(output: ModelOutput, mb: SequenceSample) -> SequenceSample:
            values_T = torch.where(mb["loss_mask"], self._outward(output.values()), 0)
            return mb.with_tokens(values=values_T).with_sequences(bootstrap_values=self._outward(output.scores()))

        return model.engine.forward(forward_inputs(data), mb_spec, post_hook)

    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> Stats:
        """Take `epochs * n_minibatches` optimizer steps toward `returns`, in a new random order in each epoch."""
        # Before `_inward`: metrics are in units of reward.
        stats: list[Stats] = [value_stats(data, model)]
        data = self._inward(model, select_trained(data))
        rng = np.random.default_rng(model.call_seed("minibatches"))
        for _ in range(self.epochs):
            for part in data.minibatches(self.n_minibatches, rng):
                stats.append(model.engine.train_batch(part, mb_spec, self.loss, self.loss_weight))
        if self.moments is not None:
            stats.append(
                {"return_moment_mean": number(self.moments.mean), "return_moment_std": number(self.moments.std)}
            )
        return merge_stats(stats)

    def loss(self, output: ModelOutput, minibatch: SequenceSample) -> tuple[Tensor, Stats]:
        """Return the aggregated sum of value losses, in the units of the network, and metrics."""
        loss_T, stats = self.objective(output.values(), minibatch)
        return self.aggregation.total(loss_T, minibatch["loss_mask"], minibatch.cu_seqlens()), stats

    def loss_weight(self, data: SequenceSample) -> Tensor:
        """Return the divisor of the loss."""
        return self.aggregation.weight(data["loss_mask"], data.cu_seqlens())

    def _outward(self, x: Tensor) -> Tensor:
        return x if self.moments is None else self.moments.denormalize(x)

    def _inward(self, model: Model, data: SequenceSample) -> SequenceSample:
        """Normalize old values by the old moments, and returns by the moments updated with them."""
        if self.moments is None:
            return data
        mask_T, returns_T = data["loss_mask"], data["returns"]
        # The old values came from the network's outputs by the old moments. Only these give the outputs back, around
        # which `objective.clip` limits the change.
        values_T = torch.where(mask_T, self.moments.normalize(data["values"]), 0)
        self.moments.update(returns_T, mask_T, model.engine.reduce)
        returns_T = torch.where(mask_T, self.moments.normalize(returns_T), 0)
        return data.with_tokens(values=values_T, returns=returns_T)

    def state_dict(self) -> dict[str, Any]:
        """Return the running moments of the returns; empty without normalization."""
        return {} if self.moments is None else {"moments": self.moments.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the running moments."""
        if self.moments is not None:
            self.moments.load_state_dict(state["moments"])

    def load_saved_state(self, saved: Mapping[str, Any]) -> None:
        """Restore the running moments saved with the weights.

        Raises:
            ConfigError: `normalization.scale` differs from the run that saved the weights.
        """
        if "moments" not in saved:
            return
        own, kind = self.normalization.scale.value, saved["moments"]["kind"]
        if self.moments is None or own != kind:
            raise ConfigError(
                f"normalization.scale={own}: the critic's weights were trained with normalization.scale={kind}. Set "
                f"normalization.scale={kind}"
            )
        self.moments.load_state_dict(saved["moments"])

    @override
    def describe(self, batch_prompts: int) -> dict[str, str]:
        return {
            "loss": f"{self.objective.describe()}, {self.aggregation.describe()}",
            "value normalization": self.normalization.scale.value,
        }


__all__ = ["PPOCriticInterface", "ValueNormalization", "ValueObjective", "ValueScale"]

"""PPO: a clipped surrogate objective with generalized advantages (arXiv:1707.06347; language models arXiv:1909.08593).

The pipeline of `policy.py`, and what needs values or text: a critic with its own model (`critic=own`) or on the actor's
(`critic=shared`, whose value loss is a term of the policy's), and pretraining text in the loss (PPO-ptx). An own critic
trains on the returns that the actor computes once for both, in the call `credit`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor
from typing_extensions import override

from realign.api import Keys, LossStats, MicroBatchSpec, Model, ModelOutput, Panel, Plan, SequenceSample, Stats
from realign.errors import SettingsError
from realign.interfaces.components import (
    POLICY_PANELS,
    VALUE_PANELS,
    Critic,
    ValueObjective,
    mix_pretraining,
    pretraining_loss,
    value_stats,
)
from realign.interfaces.policy import CREDITED, PolicyInterface, dataflow, token_traces
from realign.settings import NonNegative, NonNegativeInt


@dataclass
class PPOActorInterface(PolicyInterface):
    """The policy of PPO, with or without a critic."""

    HEADLINE = (*PolicyInterface.HEADLINE, "explained_variance")
    ALGORITHM_SETTINGS = (*PolicyInterface.ALGORITHM_SETTINGS, "critic", "critic_warmup_steps", "value")

    critic: Critic = Critic.none
    """Where values come from: none (no critic), own (a model of its own) or shared (a head on the actor)."""
    value: ValueObjective | None = None
    """Value loss with critic=shared, added to the policy loss; unset: the defaults."""
    critic_warmup_steps: NonNegativeInt = 0
    """Train only the critic for this many steps at the start (critic=own)."""
    ptx_coef: NonNegative = 0.0
    """Weight of the mean negative log-likelihood of pretraining text in the loss (PPO-ptx, arXiv:2203.02155)."""

    @override
    def ineffective(self) -> dict[str, str]:
        reasons = super().ineffective()
        if self.critic is not Critic.shared:
            reasons["value"] = f"with critic={self.critic.value}. Set critic=shared"
        if self.critic is not Critic.own:
            reasons["critic_warmup_steps"] = f"with critic={self.critic.value}. Set critic=own"
        return reasons

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.critic is Critic.shared and self.value is None:
            self.value = ValueObjective()
        if self.critic is not Critic.none and not self.advantage.gives_returns:
            why = f"{type(self.advantage).__name__} computes no returns to train a critic"
            raise SettingsError(f"critic={self.critic.value}: {why}. Set advantage=gae or critic=none")
        # The critic learns the returns that `credit` computes once, for the whole batch.
        if self.credit_per_minibatch and self.critic is Critic.own:
            raise SettingsError("credit_per_minibatch=true: cannot be combined with critic=own. Set critic=shared")

    @override
    def step_keys(self) -> Keys:
        """Return values, the advantages that `credit` computed for an own critic, and pretraining text."""
        estimated = super().step_keys()
        needs = {} if self.critic is Critic.none else {"values": f"critic={self.critic.value}"}
        needs |= dict.fromkeys(CREDITED, "critic=own") if self.critic is Critic.own else estimated.needs
        if self.ptx_coef:
            needs |= dict.fromkeys(("ptx_input_ids", "ptx_loss_mask"), f"ptx_coef={self.ptx_coef:g}")
        return Keys(needs, frozenset(estimated.needs if self.critic is Critic.own else ()))

    @override
    def outputs(self) -> frozenset[str]:
        return super().outputs() if self.value is None else super().outputs() | {"values"}

    @override
    def panels(self) -> tuple[Panel, ...]:
        return POLICY_PANELS if self.value is None else (*POLICY_PANELS, *VALUE_PANELS)

    @override
    def plan(self) -> Plan:
        return replace(super().plan(), first_training_step=self.critic_warmup_steps + 1)

    @override
    def describe(self, batch_prompts: int) -> dict[str, str]:
        return super().describe(batch_prompts) | {
            "value loss": "" if self.value is None else f"{self.value.describe()}, coefficient {self.value.coef:g}",
            "pretraining loss": f"coefficient {self.ptx_coef:g}" if self.ptx_coef else "",
        }

    @override
    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> Stats:
        if model.version < self.critic_warmup_steps:
            return self.batch_stats(model, self.with_advantages(model, data))
        return super().train_step(model, data, mb_spec)

    @override
    def adds_to_objective(self) -> bool:
        return super().adds_to_objective() or self.value is not None or self.ptx_coef > 0

    @override
    def training_sequences(self, data: SequenceSample) -> SequenceSample:
        # Prompts whose responses don't train still have their pretraining text.
        return data if "ptx_input_ids" in data else super().training_sequences(data)

    @override
    def prepare_minibatch(self, minibatch: SequenceSample, reduce: Callable[[Tensor], Tensor]) -> SequenceSample:
        minibatch = super().prepare_minibatch(minibatch, reduce)
        return mix_pretraining(minibatch, self.ptx_coef, self.loss_weight, reduce) if self.ptx_coef else minibatch

    @override
    def token_loss(
        self, output: ModelOutput, minibatch: SequenceSample, weight_T: Tensor | None
    ) -> tuple[Tensor, LossStats]:
        loss_T, stats = super().token_loss(output, minibatch, weight_T)
        if self.value is None:
            return loss_T, stats
        values_T = output.values()
        value_loss_T, value_metrics = self.value(values_T, minibatch)
        return loss_T + self.value.coef * value_loss_T, {**stats, **value_metrics, **token_traces({"value": values_T})}

    @override
    def loss(self, output: ModelOutput, minibatch: SequenceSample) -> tuple[Tensor, LossStats]:
        loss, stats = super().loss(output, minibatch)
        if not self.ptx_coef:
            return loss, stats
        text_loss, text_stats = pretraining_loss(output, minibatch)
        return loss + text_loss, {**stats, **text_stats}

    @override
    def credit_stats(self, model: Model, data: SequenceSample) -> Stats:
        stats = super().credit_stats(model, data)
        return stats if self.value is None or "returns" not in data else stats | value_stats(data, model)


__all__ = ["PPOActorInterface", "dataflow"]

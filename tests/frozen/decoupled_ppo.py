"""Decoupled PPO: proximal and behaviour policy are two policies (arXiv:2110.00641; AReaL, arXiv:2505.24298).

What sampled the tokens (`logprobs`, behaviour) may be older than the policy that an update starts from, or the same one
computed by another engine. The clip is taken around the policy that the update starts from, recomputed by a call of the
graph (`prox_logprobs`), and the distance back to the sampler is bridged by an importance weight w without gradient:

    loss of a token = w * max(-A r, -A clip(r)),    r = current / proximal,    w = proximal / behaviour

Reads what PPO reads, `prox_logprobs`, and `versions` for the metrics of staleness. By its bounds on w it is also
truncated and masked importance sampling (TIS, IcePop and their kin), and with `lam=1` and a `reward_norm` of groups
it takes GRPO's credit. Differs from AReaL by default: a rejected token leaves the divisor of the loss too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

import torch
from torch import Tensor

from realign.api import (
    DataflowGraph,
    MicroBatchSpec,
    Model,
    ModelOutput,
    SequenceSample,
    Stats,
    masked_max,
    masked_mean,
)
from tests.frozen import ppo
from tests.frozen.functional import (
    CapMode,
    ImportanceLevel,
    KLEstimator,
    PolicyObjective,
    behaviour_weights,
    kl_estimate,
    sequence_index,
)

__all__ = ["DecoupledPPOActorInterface", "Denominator", "RatioRange", "dataflow"]


class Denominator(StrEnum):
    """What the loss is divided by when tokens were rejected."""

    kept = "kept"
    """What is left."""
    all = "all"
    """All tokens, rejected ones with loss 0 (AReaL, TRL, NeMo-RL): the more is rejected, the smaller the step."""


@dataclass
class RatioRange:
    """A range of proximal / behaviour ratios."""

    level: ImportanceLevel = ImportanceLevel.token
    """token: each its own ratio | sequence: the product over the response | geometric: its geometric mean."""
    floor: float | None = None
    """Lower end, above 0; null: none."""
    cap: float | None = None
    """Upper end; null: none."""

    def __post_init__(self) -> None:
        if self.cap is not None and not self.cap > 0:
            raise ValueError(f"cap must be positive, or null, found {self.cap:g}")
        if self.floor is not None and not 0 < self.floor <= (self.floor if self.cap is None else self.cap):
            raise ValueError(f"floor must be above 0 and at most cap={self.cap}, or null, found {self.floor:g}")

    @property
    def bounded(self) -> bool:
        """Whether there is an end at all."""
        return (self.floor, self.cap) != (None, None)

    def apply(self, data: SequenceSample, mode: CapMode) -> tuple[Tensor, Tensor]:
        """`behaviour_weights` of a batch: the ratios [T] at this level, and the tokens [T] that are kept."""
        return behaviour_weights(
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
        """The range for people, such as `token ratio in [0.5, 5]`."""
        if not self.bounded:
            return f"{self.level.value} ratio, unbounded"
        ends = ["0" if self.floor is None else f"{self.floor:g}", "inf" if self.cap is None else f"{self.cap:g}"]
        return f"{self.level.value} ratio in [{', '.join(ends)}]"


@dataclass
class DecoupledPPOActorInterface(ppo.PPOActorInterface):
    """The policy of decoupled PPO: PPO around the recomputed policy, weighted back to the one that sampled."""

    behaviour_weight: RatioRange = field(default_factory=RatioRange)
    """The importance weight: ratios of its level; one outside the range becomes the nearest end (TIS)."""
    rejection: RatioRange = field(default_factory=RatioRange)
    """Tokens (at the other levels: responses) whose ratio is outside leave the loss (AReaL's behav_imp_weight_cap)."""
    denominator: Denominator = Denominator.kept
    """kept | all: whether the loss is divided by what is left after rejection, or by everything."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rejection.bounded and self.rejection.level is not ImportanceLevel.token:
            raise ValueError(
                f"rejection.level={self.rejection.level.value} has no effect without rejection.floor or rejection.cap"
            )
        if self.denominator is Denominator.kept:
            return
        if not self.rejection.bounded:
            raise ValueError("denominator=all has no effect without rejection.floor or rejection.cap: all is kept")
        if self.entropy_coef or self.kl.place is ppo.KLPlace.loss or self.value is not None:
            raise ValueError(
                "denominator=all keeps rejected tokens in the batch with a policy loss of 0, and entropy_coef, "
                "kl.place=loss and value would still train on them: use denominator=kept"
            )
        if self.objective in (PolicyObjective.gspo, PolicyObjective.gmpo):
            raise ValueError(
                f"denominator=all keeps rejected tokens in the mean that objective={self.objective.value} takes over a "
                "response, and they would be trained: use denominator=kept"
            )

    def required_inputs(self, method: str) -> frozenset[str]:
        """What PPO needs, and `prox_logprobs` to train."""
        return super().required_inputs(method) | ({"prox_logprobs"} if method == "train_step" else frozenset())

    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> Stats:
        """PPO's, with the age of the sampled tokens among the metrics where the graph gives `versions`."""
        stats = super().train_step(model, data, mb_spec)
        return stats | staleness_stats(data, model.version) if "versions" in data else stats

    def corrected(self, data: SequenceSample) -> SequenceSample:
        """`data` with advantages times behaviour weights, and without the rejected tokens in `loss_mask`.

        Every policy objective is proportional to the advantage's size, so this is the weight on the loss of a token.
        A token's weight depends on its own response only: how a batch is cut does not matter.
        """
        weight_T, _ = self.behaviour_weight.apply(data, CapMode.truncate)
        _, keep_T = self.rejection.apply(data, CapMode.mask)
        advantages_T = torch.where(keep_T, weight_T * data["advantages"], 0)
        mask_T = keep_T if self.denominator is Denominator.kept else data["loss_mask"]
        return data.with_tokens(advantages=advantages_T, loss_mask=mask_T)

    def loss(self, output: ModelOutput, minibatch: SequenceSample) -> tuple[Tensor, Stats]:
        """PPO's loss around the proximal policy, weighted back to the behaviour policy; a sum over kept tokens."""
        return super().loss(output, self.corrected(minibatch))

    def loss_weight(self, data: SequenceSample) -> Tensor:
        """What the engine divides the sum by: after rejection, unless `denominator` says otherwise."""
        return super().loss_weight(self.corrected(data))

    def batch_stats(self, data: SequenceSample) -> Stats:
        """PPO's metrics of the rollout batch, and those of the weights."""
        mask_T = data["loss_mask"]
        ratio_T, _ = RatioRange(self.behaviour_weight.level).apply(data, CapMode.truncate)
        weight_T, _ = self.behaviour_weight.apply(data, CapMode.truncate)
        _, keep_T = self.rejection.apply(data, CapMode.mask)
        kl_T = kl_estimate(data["logprobs"], data["prox_logprobs"], mask_T, KLEstimator.k3)
        stats: Stats = {
            "behaviour_kl": masked_mean(kl_T, mask_T),
            "behaviour_weight_mean": masked_mean(weight_T, keep_T),
            "behaviour_weight_max": masked_max(weight_T, keep_T),
        }
        if self.behaviour_weight.bounded:
            stats["behaviour_truncated_fraction"] = masked_mean((weight_T != ratio_T).float(), mask_T)
        if self.rejection.bounded:
            stats["behaviour_rejected_fraction"] = masked_mean((~keep_T).float(), mask_T)
        return super().batch_stats(data) | stats

    def describe(self, batch_prompts: int) -> dict[str, str]:
        """Rows of the table that is shown at launch."""
        rows = super().describe(batch_prompts)
        rows["behaviour weight"] = self.behaviour_weight.describe()
        if self.rejection.bounded:
            rows["kept in the loss"] = f"{self.rejection.describe()}; divided by {self.denominator.value}"
        return rows


def dataflow(
    *,
    kl: bool = False,
    critic: ppo.CriticPlace = ppo.CriticPlace.none,
    dense: bool = False,
    greedy_baseline: bool = False,
    ptx: bool = False,
) -> DataflowGraph:
    """PPO's graph in which the actor scores once more what was sampled, and training also sees who sampled it.

    Args:
        kl: see `ppo.dataflow`, also for the others.
        critic: none | own | shared.
        dense: rewards of tokens.
        greedy_baseline: the reward of a greedy answer is taken off.
        ptx: pretraining text.
    """
    graph = ppo.dataflow(kl=kl, critic=critic, dense=dense, greedy_baseline=greedy_baseline, ptx=ptx, recompute=True)
    trains = [replace(r, inputs=(*r.inputs, "versions")) if r.name == "actor_train" else r for r in graph.rpcs]
    return replace(graph, rpcs=tuple(trains))


def staleness_stats(data: SequenceSample, version: int) -> Stats:
    """Training steps between the policy that sampled a token and `version`: a response's oldest token, its newest.

    Args:
        data: with `versions` [T], -1 on given tokens.
        version: training steps of the policy that is about to be trained.
    """
    sampled_T, index_T = data["versions"] >= 0, sequence_index(data.cu_seqlens())
    age_T = version - data["versions"].long()
    nothing_S = torch.full((len(data.cu_seqlens()) - 1,), -1, device=age_T.device)
    oldest_S = nothing_S.scatter_reduce(0, index_T[sampled_T], age_T[sampled_T], "amax")
    newest_S = nothing_S.scatter_reduce(0, index_T[sampled_T], age_T[sampled_T], "amin", include_self=False)
    return {
        "staleness_head": masked_mean(oldest_S.float(), oldest_S >= 0),
        "staleness_tail": masked_mean(newest_S.float(), oldest_S >= 0),
        "staleness_max": masked_max(oldest_S, oldest_S >= 0),
    }

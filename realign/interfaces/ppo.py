"""PPO: a clipped surrogate on generalised advantages (arXiv:1707.06347; for language models arXiv:1909.08593).

Generation writes `input_ids`, `prompt_mask`, `loss_mask`, `logprobs` (behaviour), `versions`, `truncated`. Training
reads them with `rewards` and, where the graph has them, `ref_logprobs` (KL), `values` (a critic) and `prox_logprobs`
(the policy recomputed by the training engine; then ratios are taken against it). A response trains on its sampled
tokens only; one whose reward is missing (NaN) trains on none. Without a critic the values are 0: with `lam = 1` the
advantage of a token is then the reward still to come, as in REINFORCE++ (arXiv:2501.03262).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realign.api import (
    RPC,
    DataflowGraph,
    GenerationConfig,
    Max,
    Mean,
    MicroBatchSpec,
    Min,
    Model,
    ModelInterface,
    ModelOutput,
    SequenceSample,
    Stats,
    masked_max,
    masked_mean,
    merge_stats,
    part_sizes,
)
from realign.functional import (
    AdaptiveKLController,
    Aggregation,
    FixedKLController,
    KLEstimator,
    Level,
    Normalization,
    Scope,
    aggregate,
    aggregation_weight,
    broadcast_to_tokens,
    gae,
    kl_estimate,
    normalize,
    policy_loss,
    segment_sum,
    sequence_index,
    token_rewards,
)


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
        if self.target is not None and self.coef == 0:
            raise ValueError("kl.target multiplies kl.coef, and would leave a coefficient of 0 at 0; start above 0")

    def controller(self) -> FixedKLController | AdaptiveKLController:
        """The object that holds the coefficient."""
        if self.target is None:
            return FixedKLController(self.coef)
        return AdaptiveKLController(self.coef, self.target, self.horizon)


@dataclass
class PPOActorInterface(ModelInterface):
    """The policy of PPO. Override `compute_advantages` for credit, `loss` for the objective, `adv_norm` by flags."""

    generation: GenerationConfig = field(default_factory=GenerationConfig)
    """How responses are sampled; `generation.temperature` applies to every log-prob of the policy."""
    epochs: int = 1
    """Passes over the rollout batch."""
    n_minibatches: int = 1
    """Optimizer steps per pass; prompts are dealt out anew in each."""
    clip_low: float = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above at 1 + clip_high (larger than clip_low: DAPO, arXiv:2503.14476)."""
    dual_clip: float | None = None
    """For negative advantages the ratio counts for this much at most, > 1 (arXiv:1912.09729); null: off."""
    kl: KLPenalty = field(default_factory=KLPenalty)
    """Penalty against the reference policy; it needs `ref_logprobs` in the graph."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus (nats per token)."""
    gamma: float = 1.0
    """Discount per sampled token."""
    lam: float = 0.95
    """Lambda of generalised advantage estimation (arXiv:1506.02438)."""
    adv_norm: Normalization = field(default_factory=lambda: Normalization(level=Level.token))
    """Normalisation of advantages: whose mean is subtracted, whose deviation divides."""
    aggregation: Aggregation = Aggregation.token_mean
    """How tokens and sequences weigh in the loss."""
    aggregation_constant: float | None = None
    """Tokens per sequence of aggregation=constant."""

    def __post_init__(self) -> None:
        if distorted := self.generation.distorted():
            raise ValueError(
                f"generation.{distorted[0]} changes the sampled distribution, and the ratios of this loss would be "
                "wrong; use neutral settings for training (evaluation may use any)"
            )
        checks = {
            "epochs": (self.epochs >= 1, "at least 1"),
            "n_minibatches": (self.n_minibatches >= 1, "at least 1"),
            "clip_low": (0 <= self.clip_low <= 1, "from 0 to 1"),
            "clip_high": (self.clip_high >= 0, "at least 0"),
            "dual_clip": (self.dual_clip is None or self.dual_clip > 1, "above 1, or null"),
            "gamma": (0 <= self.gamma <= 1, "from 0 to 1"),
            "lam": (0 <= self.lam <= 1, "from 0 to 1"),
            "aggregation_constant": (self.aggregation_constant is None or self.aggregation_constant > 0, "positive"),
        }
        for name, (ok, valid) in checks.items():
            if not ok:
                raise ValueError(f"{name} must be {valid}, found {getattr(self, name)}")
        needs_constant = self.aggregation is Aggregation.constant
        if needs_constant != (self.aggregation_constant is not None):
            raise ValueError(
                f"aggregation={self.aggregation.value} with aggregation_constant={self.aggregation_constant}: "
                "aggregation=constant, and only it, needs a number of tokens per sequence"
            )
        self.kl_controller = self.kl.controller()

    def required_inputs(self, method: str) -> frozenset[str]:
        """`ref_logprobs` to train with a KL penalty (`graph.kl=true` provides it)."""
        penalised = method == "train_step" and self.kl.place is not KLPlace.none
        return frozenset({"ref_logprobs"} if penalised else ())

    def generate(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Sample `generation.n` responses per prompt; `versions` says which policy sampled each token."""
        out = model.machine.generate(data, self.generation, seed=model.call_seed("generate"))
        return out.with_tokens(versions=torch.where(out["loss_mask"], model.version, -1).int())

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """`logprobs` [T] of the sampled tokens under the present weights."""
        return score_logprobs(model, data, mb_spec, self.generation.temperature)

    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> Stats:
        """Assign credit once, then take `epochs * n_minibatches` optimizer steps, shuffled anew in each pass."""
        data = self.compute_advantages(model, drop_missing_rewards(data))
        rng = np.random.default_rng(model.call_seed("minibatches"))
        stats: list[Stats] = [self.batch_stats(data)]
        for _ in range(self.epochs):
            for part in data.minibatches(self.n_minibatches, rng):
                stats.append(model.machine.train_batch(part, mb_spec, self.loss, self.loss_weight))
        # Before the first step the policy is the one that sampled: this must be 0 up to rounding.
        first = {"first_logprob_diff_max": stats[1]["logprob_diff_max"]} if "logprob_diff_max" in stats[1] else {}
        merged = merge_stats([*stats, first])
        self._update_kl(model, data, merged)
        return merged

    def compute_advantages(self, model: Model, data: SequenceSample) -> SequenceSample:
        """Add `advantages` [T] and `returns` [T]: GAE over the sampled tokens, then `adv_norm`."""
        mask_T, cu_seqlens = data["loss_mask"], data.cu_seqlens()
        kl_T, coef = None, 0.0
        if self.kl.place is KLPlace.reward:
            kl_T, coef = self.reward_kl(data), self.kl_controller.value
        rewards_T = token_rewards(data["rewards"], mask_T, cu_seqlens, kl_T=kl_T, kl_coef=coef)
        values_T = data["values"] if "values" in data else torch.zeros_like(rewards_T)
        advantages_T, returns_T = gae(
            rewards_T,
            values_T,
            mask_T,
            cu_seqlens,
            gamma=self.gamma,
            lam=self.lam,
            bootstrap_S=data.get("bootstrap_values"),
        )
        group_T = data.group_index()[sequence_index(cu_seqlens)]
        advantages_T = normalize(advantages_T, group_T, mask_T, self.adv_norm, model.machine.reduce)
        return data.with_tokens(advantages=advantages_T, returns=returns_T)

    def loss(self, output: ModelOutput, minibatch: SequenceSample) -> tuple[Tensor, Stats]:
        """Clipped surrogate, plus the KL penalty and minus the entropy bonus where asked for; a sum over the batch."""
        mask_T, cu_seqlens = minibatch["loss_mask"], minibatch.cu_seqlens()
        logprobs_T, entropy_T = output.logprobs_and_entropy(temperature=self.generation.temperature, where_T=mask_T)
        old_T = old_logprobs(minibatch)
        clip = policy_loss(
            logprobs_T,
            old_T,
            minibatch["advantages"],
            mask_T,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
        loss_T = clip.loss_T
        stats: Stats = {
            "policy_loss": masked_mean(clip.loss_T, mask_T),
            "clip_fraction": masked_mean(clip.clipped_T, mask_T),
            "ratio_mean": masked_mean(clip.ratio_T, mask_T),
            "ratio_max": masked_max(clip.ratio_T, mask_T),
            "ratio_min": Min(-masked_max(-clip.ratio_T, mask_T).value),
            "ratio_clamped_fraction": masked_mean(clip.clamped_T, mask_T),
            "logprob_diff_max": masked_max((logprobs_T - old_T).abs(), mask_T),
            "approx_kl": masked_mean(kl_estimate(old_T, logprobs_T.detach(), mask_T, KLEstimator.k3), mask_T),
            "entropy": masked_mean(entropy_T, mask_T),
        }
        if self.dual_clip is not None:
            stats["dual_clip_fraction"] = masked_mean(clip.dual_clipped_T, mask_T)
        if self.kl.place is KLPlace.loss:
            kl_T = kl_estimate(logprobs_T, minibatch["ref_logprobs"], mask_T, self.kl.estimator)
            loss_T = loss_T + self.kl_controller.value * kl_T
            stats["ref_kl"] = masked_mean(kl_T, mask_T)
        if self.entropy_coef:
            loss_T = loss_T - self.entropy_coef * entropy_T
        return aggregate(loss_T, mask_T, cu_seqlens, self.aggregation), stats

    def loss_weight(self, data: SequenceSample) -> Tensor:
        """What the engine divides the sum by, after every filter on `loss_mask`."""
        return aggregation_weight(
            data["loss_mask"], data.cu_seqlens(), self.aggregation, constant=self.aggregation_constant
        )

    def reward_kl(self, data: SequenceSample) -> Tensor:
        """[T] KL estimate of the sampling policy against the reference, on sampled tokens."""
        return kl_estimate(old_logprobs(data), data["ref_logprobs"], data["loss_mask"], self.kl.estimator)

    def batch_stats(self, data: SequenceSample) -> Stats:
        """Metrics of the rollout batch itself."""
        mask_T, cu_seqlens = data["loss_mask"], data.cu_seqlens()
        trained_S = segment_sum(mask_T, cu_seqlens) > 0
        advantages_T = data["advantages"]
        stats: Stats = {
            "advantage_mean": masked_mean(advantages_T, mask_T),
            "advantage_max": masked_max(advantages_T, mask_T),
            "advantage_min": Min(-masked_max(-advantages_T, mask_T).value),
            "trained_fraction": masked_mean(trained_S.float(), torch.ones_like(trained_S)),
        }
        if "ref_logprobs" in data:
            kl_S = segment_sum(self.reward_kl(data), cu_seqlens)
            stats["ref_kl_per_sequence"] = masked_mean(kl_S, trained_S)
            if self.kl.place is KLPlace.reward:
                stats["ref_kl"] = masked_mean(self.reward_kl(data), mask_T)
        return stats

    def _update_kl(self, model: Model, data: SequenceSample, stats: Stats) -> None:
        """Move the coefficient once per rollout batch, by the KL per trained sequence over all ranks (SEEDS A34)."""
        if self.kl.place is KLPlace.none:
            return
        stats["kl_coef"] = Max(torch.tensor(self.kl_controller.value))
        if self.kl.target is None:
            return
        trained = stats["ref_kl_per_sequence"]
        assert isinstance(trained, Mean)
        sums = torch.stack([trained.total.double(), trained.weight.double()])
        kl, n_sequences = model.machine.reduce(sums).tolist()
        if n_sequences:
            self.kl_controller.update(kl / n_sequences, int(n_sequences))

    def state_dict(self) -> dict[str, Any]:
        """The KL controller's state."""
        return {"kl_controller": self.kl_controller.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back the KL controller's state."""
        self.kl_controller.load_state_dict(state["kl_controller"])

    def describe(self, batch_prompts: int) -> dict[str, str]:
        """Rows of the table that is shown at launch."""
        steps = self.epochs * self.n_minibatches
        kl = self.kl
        place = "not applied" if kl.place is KLPlace.none else f"in the {kl.place.value}, {kl.estimator.value}"
        if kl.place is not KLPlace.none:
            place += f", coefficient {kl.coef:g}" + (f" steered to {kl.target:g} nats" if kl.target else "")
        return {
            "group size (responses per prompt)": str(self.generation.n),
            "sequences per step": str(batch_prompts * self.generation.n),
            "optimizer steps per step": f"{steps} ({self.epochs} epochs x {self.n_minibatches} mini-batches)",
            "prompts per optimizer step": part_sizes(batch_prompts, self.n_minibatches),
            "sampler": f"neutral, temperature {self.generation.temperature:g}",
            "KL to reference": place,
            "advantage normalisation": normalization_formula(self.adv_norm),
            "loss aggregation": self.aggregation.value,
        }


@dataclass
class ReferenceInterface(ModelInterface):
    """A frozen policy that only scores: `logprobs` of sampled tokens, at the sampler's temperature."""

    temperature: float = 1.0
    """Must be the sampler's; the launch compares them."""

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """`logprobs` [T] of the sampled tokens."""
        return score_logprobs(model, data, mb_spec, self.temperature)


def dataflow(*, kl: bool = False, recompute: bool = False) -> DataflowGraph:
    """The graph of PPO and of its kin.

    Args:
        kl: a role `ref` scores the responses (needed by `kl.place`).
        recompute: the actor scores its responses once more with the training engine, and ratios are taken against
            that; costs a forward pass, and takes differences between sampler and trainer out of the ratio.
    """
    sampled = ("input_ids", "prompt_mask", "loss_mask", "logprobs", "versions", "truncated")
    scored = ("input_ids", "loss_mask")
    train: tuple[str, ...] = (*scored, "logprobs", "rewards")
    rpcs = [
        RPC("actor_gen", "actor", "generate", inputs=("prompt_ids",), outputs=sampled),
        RPC("reward_inf", "reward", "inference", inputs=("input_ids", "prompt_mask", "row"), outputs=("rewards",)),
    ]
    if kl:
        rpcs.append(
            RPC("ref_inf", "ref", "inference", scored, outputs=("ref_logprobs",), rename={"logprobs": "ref_logprobs"})
        )
        train = (*train, "ref_logprobs")
    if recompute:
        rpcs.append(
            RPC("actor_inf", "actor", "inference", scored, ("prox_logprobs",), rename={"logprobs": "prox_logprobs"})
        )
        train = (*train, "prox_logprobs")
    rpcs.append(RPC("actor_train", "actor", "train_step", inputs=train))
    return DataflowGraph(tuple(rpcs), dataset_keys=("prompt_ids", "row"), results=("versions", "truncated"))


def score_logprobs(model: Model, data: SequenceSample, mb_spec: MicroBatchSpec, temperature: float) -> SequenceSample:
    """A sample with `logprobs` [T] of the tokens of `loss_mask` under the model, at `temperature`."""

    def post_hook(output: ModelOutput, mb: SequenceSample) -> SequenceSample:
        return mb.with_tokens(logprobs=output.logprobs(temperature=temperature, where_T=mb["loss_mask"]))

    return model.machine.forward(data.select(["input_ids", "loss_mask"]), mb_spec, post_hook)


def old_logprobs(data: SequenceSample) -> Tensor:
    """[T] log-probs that ratios are taken against: the recomputed ones where the graph has them, else behaviour."""
    return data["prox_logprobs"] if "prox_logprobs" in data else data["logprobs"]


def drop_missing_rewards(data: SequenceSample) -> SequenceSample:
    """Take responses without a reward (NaN) out of the loss: their `loss_mask` becomes False throughout."""
    present_T = broadcast_to_tokens(data["rewards"].isfinite(), data.cu_seqlens())
    return data.with_tokens(loss_mask=data["loss_mask"] & present_T)


def normalization_formula(spec: Normalization) -> str:
    """`spec` as a formula for people."""
    mean = {Scope.none: "", Scope.batch: " - mean(batch)", Scope.group: " - mean(group)"}[spec.mean]
    if spec.leave_one_out:
        mean = mean.replace(")", " without itself)")
    if spec.std is Scope.none:
        return f"A{mean} per {spec.level.value}"
    kind = "sample" if spec.unbiased else "population"
    deviation = f"{kind} std({spec.std.value})"
    below = f"sqrt({deviation}^2 + {spec.eps:g})" if spec.eps_inside_sqrt else f"({deviation} + {spec.eps:g})"
    return f"(A{mean}) / {below} per {spec.level.value}"

"""PPO: a clipped surrogate on generalised advantages (arXiv:1707.06347; for language models arXiv:1909.08593).

Generation writes `input_ids`, `prompt_mask`, `loss_mask`, `logprobs` (behaviour), `versions`, `truncated`. Training
reads them with `rewards` and, where the graph has them, `ref_logprobs` (KL), `values` (a critic) and `prox_logprobs`
(the policy recomputed by the training engine; then ratios are taken against it). A response trains on its sampled
tokens only; one whose reward is missing (NaN) trains on none. Without a critic the values are 0: with `lam = 1` the
advantage of a token is then the reward still to come, as in REINFORCE++ (arXiv:2501.03262).

Credit is assigned once per rollout batch, here and nowhere else. With a critic of its own (`critic.py`) that is a call
of the graph, from which both learn; otherwise it is the first thing that `train_step` does. The order: scores are
shaped (`reward`), truncation is judged (`truncation`), the baseline is taken off, filters take responses out of
`loss_mask`; then `reward_norm`, the KL penalty and dense rewards, whitening, GAE, `adv_norm`.
"""

from __future__ import annotations

import math
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
    masked_variance,
    merge_stats,
    part_sizes,
)
from realign.functional import (
    Aggregation,
    KLEstimator,
    Level,
    Normalization,
    PolicyObjective,
    Scope,
    aggregate,
    aggregation_weight,
    broadcast_to_tokens,
    gae,
    keep_best,
    kl_estimate,
    nll_loss,
    normalize,
    policy_objective,
    segment_sum,
    sequence_index,
    token_rewards,
)
from realign.interfaces.critic import ValueObjective, trained, value_stats
from realign.interfaces.formulas import normalization_formula, objective_formula
from realign.interfaces.limits import EarlyStop, KLPenalty, KLPlace
from realign.interfaces.pretraining import mix_pretraining
from realign.interfaces.reference import ReferenceInterface, old_logprobs, score_logprobs
from realign.interfaces.shaping import RewardShaping, Truncation, total_rewards


@dataclass
class PPOActorInterface(ModelInterface):
    """The policy of PPO. Override `compute_advantages` for credit, `loss` for the objective, `adv_norm` by flags."""

    generation: GenerationConfig = field(default_factory=GenerationConfig)
    """How responses are sampled; `generation.temperature` applies to every log-prob of the policy."""
    epochs: int = 1
    """Passes over the rollout batch."""
    n_minibatches: int = 1
    """Optimizer steps per pass; prompts are dealt out anew in each."""
    clip_low: float | None = 0.2
    """The ratio is clipped below at 1 - clip_low; null, with cispo and gmpo only: it has no lower bound."""
    clip_high: float = 0.2
    """The ratio is clipped above at 1 + clip_high (larger than clip_low: DAPO, arXiv:2503.14476)."""
    objective: PolicyObjective = PolicyObjective.clip
    """clip (PPO) | reinforce | cispo | gspo | sapo | gmpo: what is made of ratio and advantage."""
    tau_pos: float = 1.0
    """Temperature of objective=sapo where the advantage is positive."""
    tau_neg: float = 1.05
    """Temperature of objective=sapo where it is negative."""
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
    reward: RewardShaping = field(default_factory=RewardShaping)
    """What is made of a score before credit is assigned: affine map, clip, scale, whitening."""
    truncation: Truncation = field(default_factory=Truncation)
    """What is made of responses that hit the length limit."""
    reward_norm: Normalization = field(default_factory=lambda: Normalization(mean=Scope.none, std=Scope.none))
    """Normalisation of shaped scores, one per response, before they become rewards of tokens. With `adv_norm` as well,
    two normalisations follow each other: a mean over the group here and whitening there is REINFORCE++-baseline."""
    adv_norm: Normalization = field(default_factory=lambda: Normalization(level=Level.token))
    """Normalisation of advantages: whose mean is subtracted, whose deviation divides."""
    credit_per_minibatch: bool = False
    """Assign credit anew in every mini-batch, so that whitening and normalisation use its statistics and not those of
    the rollout batch (openai/lm-human-preferences). Not with a critic of its own, which learns from one credit."""
    min_response_tokens: int = 0
    """Shorter responses leave the loss (DeepSpeed-Chat drops those of 1 token: 2)."""
    keep_best: int | None = None
    """Of the responses to a prompt only this many, with the highest scores, train (realhf's best-of-k); null: all."""
    value: ValueObjective | None = None
    """Adds the loss of values to the policy's, for a model with a value head; null: values are no business of this
    model."""
    ptx_coef: float = 0.0
    """Weight of the mean negative log-likelihood of pretraining text, added to the loss (PPO-ptx, arXiv:2203.02155)."""
    early_stop: EarlyStop = field(default_factory=EarlyStop)
    """Bounds beyond which a rollout batch is not learned from any further."""
    critic_warmup_steps: int = 0
    """Training steps at the start in which only the critic, which has to be one of its own, learns."""
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
        gmpo = self.objective is PolicyObjective.gmpo
        checks = {
            "epochs": (self.epochs >= 1, "at least 1"),
            "n_minibatches": (self.n_minibatches >= 1, "at least 1"),
            "clip_low": (
                self.clip_low is None or 0 <= self.clip_low <= (math.inf if gmpo else 1),
                "at least 0" if gmpo else "from 0 to 1",
            ),
            "clip_high": (self.clip_high >= 0, "at least 0"),
            "dual_clip": (self.dual_clip is None or self.dual_clip > 1, "above 1, or null"),
            "gamma": (0 <= self.gamma <= 1, "from 0 to 1"),
            "lam": (0 <= self.lam <= 1, "from 0 to 1"),
            "aggregation_constant": (self.aggregation_constant is None or self.aggregation_constant > 0, "positive"),
            "tau_pos": (self.tau_pos > 0, "positive"),
            "tau_neg": (self.tau_neg > 0, "positive"),
            "min_response_tokens": (
                0 <= self.min_response_tokens <= self.generation.max_new_tokens,
                f"from 0 to generation.max_new_tokens={self.generation.max_new_tokens}",
            ),
            "keep_best": (
                self.keep_best is None or 1 <= self.keep_best <= self.generation.n,
                f"from 1 to generation.n={self.generation.n}, or null",
            ),
            "ptx_coef": (self.ptx_coef >= 0, "at least 0"),
            "critic_warmup_steps": (self.critic_warmup_steps >= 0, "at least 0"),
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
        if self.value is not None and self.critic_warmup_steps:
            raise ValueError(
                f"critic_warmup_steps={self.critic_warmup_steps} lets a critic of its own learn alone; with `value` "
                "the values learn in this role's own loss, and would wait too"
            )
        self._check_objective()
        self._check_normalization()
        if self.truncation.overlong_buffer > self.generation.max_new_tokens:
            raise ValueError(
                f"truncation.overlong_buffer={self.truncation.overlong_buffer} is longer than a response can be: "
                f"generation.max_new_tokens={self.generation.max_new_tokens}"
            )
        self.kl_controller = self.kl.controller()

    def _check_normalization(self) -> None:
        """Refuse a level at which this interface does not normalise, and scores that would all become 0."""
        if self.adv_norm.active and self.adv_norm.level is not Level.token:
            raise ValueError(
                f"adv_norm.level={self.adv_norm.level.value}: advantages of tokens are normalised, by adv_norm.level="
                "token; scores of responses by reward_norm"
            )
        if self.reward_norm.active and self.reward_norm.level is not Level.sequence:
            raise ValueError(
                f"reward_norm.level={self.reward_norm.level.value}: a response has one score, which is normalised by "
                "reward_norm.level=sequence"
            )
        if self.generation.n < 2 and Scope.group in (self.reward_norm.mean, self.reward_norm.std):
            raise ValueError(
                f"generation.n={self.generation.n}: the score of the only response to a prompt would always become 0 "
                "by a reward_norm over the group; use generation.n of 2 or more, or reward_norm.mean=batch"
            )

    def _check_objective(self) -> None:
        """Refuse settings of another objective than the chosen one."""
        ranged, soft = self.objective.has_clip, self.objective is PolicyObjective.sapo
        reads = {"clip_low": ranged, "clip_high": ranged, "tau_pos": soft, "tau_neg": soft}
        unread = [n for n, read in reads.items() if not read and getattr(self, n) != getattr(PPOActorInterface, n)]
        if self.dual_clip is not None and not self.objective.has_dual_clip:
            unread.append("dual_clip")
        if unread:
            name, found = unread[0], getattr(self, unread[0])
            value = "null" if found is None else f"{found:g}"
            raise ValueError(f"{name}={value} has no effect with objective={self.objective.value}; leave it out")
        if self.clip_low is None and self.objective.has_dual_clip:
            raise ValueError(
                f"clip_low=null: objective={self.objective.value} has a lower bound; give a number from 0 to 1 (a "
                "ratio is never below 0, so 1 does not bound it)"
            )

    def check(self, rpc: RPC) -> None:
        """Refuse settings that do no good in this graph: by who says what states are worth, by what rewards it has."""
        if rpc.method == "credit":
            self._check_own_critic()
        elif rpc.method == "train_step":
            self._check_training(frozenset(rpc.inputs))
        if "dense_rewards" in rpc.inputs and (self.reward.shapes_scores or self.reward_norm.active):
            raise ValueError(
                "reward.bias, gain, clip, scale and reward_norm act on the score of a whole response, which "
                "graph.dense=true leaves at 0; shape the rewards of tokens where they are made"
            )
        if "baseline_rewards" in rpc.inputs and self.truncation.changes_scores:
            raise ValueError(
                "truncation.reward and truncation.overlong_buffer would change the scores of samples and not that of "
                "the greedy answer which graph.greedy_baseline takes off; leave truncation as it is, or mask=true"
            )

    def _check_own_critic(self) -> None:
        if self.credit_per_minibatch:
            raise ValueError(
                "credit_per_minibatch assigns credit in train_step, but with graph.critic=own it is assigned once, for "
                "actor and critic; use graph.critic=shared or none"
            )
        if self.value is not None:
            raise ValueError(
                "value adds the loss of values to the policy's, but with graph.critic=own the critic learns them; "
                "use graph.critic=shared, or set value=null"
            )

    def _check_training(self, inputs: frozenset[str]) -> None:
        credited = "advantages" in inputs
        if self.critic_warmup_steps and not credited:
            raise ValueError(
                f"critic_warmup_steps={self.critic_warmup_steps}: in this graph no critic of its own could learn "
                "alone; set graph.critic=own"
            )
        if "values" in inputs and not credited and self.value is None:
            raise ValueError(
                "value=null, but with graph.critic=shared the policy's loss is what trains the values; set value (such "
                "as value.coef=0.1), or use graph.critic=own"
            )
        if "ptx_input_ids" in inputs and not self.ptx_coef:
            raise ValueError("ptx_coef=0, but graph.ptx=true brings pretraining text; set ptx_coef, or graph.ptx=false")

    def needed_outputs(self) -> frozenset[str]:
        """Log-probs, and the values whose loss is added."""
        return frozenset({"logprobs"} if self.value is None else {"logprobs", "values"})

    def required_inputs(self, method: str) -> frozenset[str]:
        """Keys without which a setting would have no effect: `ref_logprobs` for a KL penalty, and so on."""
        needs = {
            "ref_logprobs": self.kl.place is not KLPlace.none,
            "truncated": self.truncation.looks,
            "bootstrap_values": self.truncation.bootstrap,
            "values": self.value is not None,
        }
        if method == "train_step":
            needs["ptx_input_ids"] = self.ptx_coef > 0
        assigns = method in ("credit", "train_step")
        return frozenset(key for key, needed in needs.items() if assigns and needed)

    def generate(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Sample `generation.n` responses per prompt; `versions` says which policy sampled each token."""
        return model.sampler.generate(data, self.generation, seed=model.call_seed("generate"))

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """`logprobs` [T] of the sampled tokens under the present weights."""
        return score_logprobs(model, data, mb_spec, self.generation.temperature)

    def credit(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """`advantages` and `returns` [T], and the `loss_mask` [T] that is left after every filter."""
        return self.compute_advantages(model, self.prepare(model, data)).select(["advantages", "returns", "loss_mask"])

    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> Stats:
        """Take `epochs * n_minibatches` optimizer steps, shuffled anew in each pass.

        Credit that the graph did not assign (`advantages`) is assigned first, once.
        """
        if "advantages" not in data:
            data = self.prepare(model, data)
            if not self.credit_per_minibatch:
                data = self.compute_advantages(model, data)
        stats: list[Stats] = [self.batch_stats(data)]
        if self.value is not None and "returns" in data:
            stats.append(value_stats(data, model))
        if model.version < self.critic_warmup_steps:
            return merge_stats(stats)
        steps, further = self._optimize(model, data, mb_spec)
        # Before the first step the policy is the one that sampled: this must be 0 up to rounding.
        if "logprob_diff_max" in steps[0]:
            further.append({"first_logprob_diff_max": steps[0]["logprob_diff_max"]})
        merged = merge_stats([*stats, *steps, *further])
        self._update_kl(model, data, merged)
        return merged

    def _optimize(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> tuple[list[Stats], list[Stats]]:
        """Make the optimizer steps of a rollout batch, all of them or until `early_stop` ends them.

        Returns:
            The metrics of each optimizer step, and further ones.
        """
        allowed = True

        def step_if(stats: Stats) -> bool:
            nonlocal allowed
            allowed = self.early_stop.allows(stats)
            return allowed

        if "ptx_input_ids" not in data:
            data = trained(data)
        rng = np.random.default_rng(model.call_seed("minibatches"))
        steps, further = list[Stats](), list[Stats]()
        # one after another, as they are needed: the passes after an early stop are not even dealt out
        for part in (part for _ in range(self.epochs) for part in data.minibatches(self.n_minibatches, rng)):
            if self.credit_per_minibatch:
                part = self.compute_advantages(model, part)
                further.append(self.credit_stats(part))
                if self.value is not None:
                    further.append(value_stats(part, model))
            if self.ptx_coef:
                part = mix_pretraining(part, self.ptx_coef, self.loss_weight, model.machine.reduce)
            steps.append(model.machine.train_batch(part, mb_spec, self.loss, self.loss_weight, step_if))
            if not allowed:
                break
        if self.early_stop.bounded:
            further.append({"early_stopped": Max(torch.tensor(float(not allowed)))})
        return steps, further

    def prepare(self, model: Model, data: SequenceSample) -> SequenceSample:
        """Shape the scores in `rewards` and take what must not train out of `loss_mask`; once per rollout batch."""
        cu_seqlens, truncated_S = data.cu_seqlens(), data.get("truncated")
        tokens_S = segment_sum(data["loss_mask"], cu_seqlens)
        valid_S = data["rewards"].isfinite() & (tokens_S >= max(1, self.min_response_tokens))
        self.reward.observe(data["rewards"], valid_S, model.machine.reduce)
        scores_S = self.reward.shape(data["rewards"])
        scores_S = self.truncation.scores(scores_S, truncated_S, tokens_S, self.generation.max_new_tokens)
        if self.truncation.mask and truncated_S is not None:
            valid_S = valid_S & ~truncated_S
        if "baseline_rewards" in data:
            scores_S = scores_S - self._baseline(data)
            valid_S = valid_S & scores_S.isfinite()
        if self.keep_best is not None:
            total_S = total_rewards(data.with_sequences(rewards=scores_S))
            valid_S = keep_best(total_S, data.group_index(), valid_S, self.keep_best)
        mask_T = data["loss_mask"] & broadcast_to_tokens(valid_S, cu_seqlens)
        return data.with_sequences(rewards=scores_S).with_tokens(loss_mask=mask_T)

    def compute_advantages(self, model: Model, data: SequenceSample) -> SequenceSample:
        """Add `advantages` [T] and `returns` [T]: GAE over the sampled tokens, then `adv_norm`."""
        mask_T, cu_seqlens = data["loss_mask"], data.cu_seqlens()
        reduce, group_S = model.machine.reduce, data.group_index()
        scores_S = data["rewards"]
        if self.reward_norm.active:
            scores_S = normalize(scores_S, group_S, segment_sum(mask_T, cu_seqlens) > 0, self.reward_norm, reduce)
        kl_T, coef = None, 0.0
        if self.kl.place is KLPlace.reward:
            kl_T, coef = self.reward_kl(data), self.kl_controller.value
        rewards_T = token_rewards(scores_S, mask_T, cu_seqlens, kl_T=kl_T, kl_coef=coef)
        if "dense_rewards" in data:
            rewards_T = rewards_T + torch.where(mask_T, data["dense_rewards"], 0)
        rewards_T = self.reward.tokens(rewards_T, mask_T, reduce)
        values_T = data["values"] if "values" in data else torch.zeros_like(rewards_T)
        bootstrap_S = data["bootstrap_values"] * data["truncated"] if self.truncation.bootstrap else None
        advantages_T, returns_T = gae(
            rewards_T, values_T, mask_T, cu_seqlens, gamma=self.gamma, lam=self.lam, bootstrap_S=bootstrap_S
        )
        advantages_T = normalize(advantages_T, group_S[sequence_index(cu_seqlens)], mask_T, self.adv_norm, reduce)
        return data.with_tokens(advantages=advantages_T, returns=returns_T)

    def loss(self, output: ModelOutput, minibatch: SequenceSample) -> tuple[Tensor, Stats]:
        """Clipped surrogate, plus the KL penalty and minus the entropy bonus where asked for; a sum over the batch."""
        mask_T, cu_seqlens = minibatch["loss_mask"], minibatch.cu_seqlens()
        logprobs_T, entropy_T = output.logprobs_and_entropy(temperature=self.generation.temperature, where_T=mask_T)
        old_T = old_logprobs(minibatch)
        clip = policy_objective(
            logprobs_T,
            old_T,
            minibatch["advantages"],
            mask_T,
            cu_seqlens,
            objective=self.objective,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            tau_pos=self.tau_pos,
            tau_neg=self.tau_neg,
        )
        loss_T = clip.loss_T
        stats: Stats = {
            "policy_loss": masked_mean(clip.loss_T, mask_T),
            "clip_fraction": masked_mean(clip.clipped_T, mask_T),
            "ratio_mean": masked_mean(clip.ratio_T, mask_T),
            "ratio_var": masked_variance(clip.ratio_T, mask_T),
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
        if self.value is not None:
            value_loss_T, value = self.value(output.values(), minibatch)
            loss_T, stats = loss_T + self.value.coef * value_loss_T, stats | value
        loss = aggregate(loss_T, mask_T, cu_seqlens, self.aggregation)
        if self.ptx_coef:
            weight_T = minibatch["ptx_weight"]
            nll_T = nll_loss(output.logprobs(where_T=weight_T > 0), weight_T > 0)
            loss, stats["ptx_nll"] = loss + (weight_T * nll_T).sum(), masked_mean(nll_T, weight_T > 0)
        return loss, stats

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
        stats: Stats = {"trained_fraction": masked_mean(trained_S.float(), torch.ones_like(trained_S))}
        if "logprobs" in data:
            surprise_S = segment_sum(torch.where(mask_T, -data["logprobs"], 0), cu_seqlens)
            stats["entropy_per_sequence"] = masked_mean(surprise_S, trained_S)
        if "advantages" in data:
            stats |= self.credit_stats(data)
        if "ref_logprobs" in data:
            kl_T = self.reward_kl(data)
            stats["ref_kl_per_sequence"] = masked_mean(segment_sum(kl_T, cu_seqlens), trained_S)
            if self.kl.place is KLPlace.reward:
                stats["ref_kl"] = masked_mean(kl_T, mask_T)
        return stats

    def credit_stats(self, data: SequenceSample) -> Stats:
        """Metrics of advantages, over the tokens that train."""
        mask_T, advantages_T = data["loss_mask"], data["advantages"]
        return {
            "advantage_mean": masked_mean(advantages_T, mask_T),
            "advantage_max": masked_max(advantages_T, mask_T),
            "advantage_min": Min(-masked_max(-advantages_T, mask_T).value),
        }

    def _update_kl(self, model: Model, data: SequenceSample, stats: Stats) -> None:
        """Move the coefficient once per rollout batch, by the KL per trained sequence over all ranks."""
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

    def _baseline(self, data: SequenceSample) -> Tensor:
        """[S] shaped score of the one response that each prompt is compared with (`baseline_rewards`)."""
        rewards_P = data["baseline_rewards"]
        if len(rewards_P) != len(data):
            raise ValueError(
                f"baseline_rewards holds {len(rewards_P)} rewards for {len(data)} prompts; a baseline is one per prompt"
            )
        return self.reward.shape(rewards_P)[data.group_index()]

    def state_dict(self) -> dict[str, Any]:
        """The state of the KL controller and of the running scale of scores."""
        return {"kl_controller": self.kl_controller.state_dict(), "reward": self.reward.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.kl_controller.load_state_dict(state["kl_controller"])
        self.reward.load_state_dict(state["reward"])

    def describe(self, batch_prompts: int) -> dict[str, str]:
        """Rows of the table that is shown at launch."""
        steps = self.epochs * self.n_minibatches
        whose = " of each mini-batch" if self.credit_per_minibatch else ""
        rows = {
            "optimizer steps per step": f"{steps} ({self.epochs} epochs x {self.n_minibatches} mini-batches)",
            "prompts per optimizer step": part_sizes(batch_prompts, self.n_minibatches),
            "KL to reference": self.kl.describe(),
            "credit": self.credit_formula(),
            "advantage normalisation": normalization_formula(self.adv_norm) + whose,
            "policy objective": objective_formula(
                self.objective, self.clip_low, self.clip_high, self.tau_pos, self.tau_neg
            ),
            "loss aggregation": self.aggregation.value,
        }
        return rows | {name: value for name, value in self._further_rows().items() if value}

    def credit_formula(self) -> str:
        """How rewards become advantages, for people."""
        return f"GAE, gamma {self.gamma:g}, lambda {self.lam:g}"

    def _further_rows(self) -> dict[str, str]:
        """Rows of `describe` for what is off by default; empty where it is off."""
        n, shortest, best = self.generation.n, self.min_response_tokens, self.keep_best
        kept = [f"the {best} of {n} per prompt with the highest scores"] if best is not None else []
        kept += [f"those of at least {shortest} tokens"] if shortest else []
        normalised = self.reward_norm.active
        return {
            "scores": self.reward.describe(),
            "truncated responses": self.truncation.describe(),
            "score normalisation": normalization_formula(self.reward_norm, "R") if normalised else "",
            "responses in the loss": ", ".join(kept),
            "entropy bonus": f"coefficient {self.entropy_coef:g}" if self.entropy_coef else "",
            "value loss": f"{self.value.describe()}, coefficient {self.value.coef:g}" if self.value is not None else "",
            "pretraining loss": f"coefficient {self.ptx_coef:g}" if self.ptx_coef else "",
            "early stop": self.early_stop.describe(),
            "steps before the first update": f"{warm_up} (the critic learns alone)"
            if (warm_up := self.critic_warmup_steps)
            else "",
        }


class CriticPlace(StrEnum):
    """Which model says what states are worth."""

    none = "none"
    """None: values are 0."""
    own = "own"
    """The role `critic`, trained beside the actor."""
    shared = "shared"
    """The role `critic` is a view of the actor's value head, and the actor's loss trains it (`value`)."""


def dataflow(
    *,
    kl: bool = False,
    recompute: bool = False,
    critic: CriticPlace = CriticPlace.none,
    dense: bool = False,
    greedy_baseline: bool = False,
    ptx: bool = False,
) -> DataflowGraph:
    """The graph of PPO and of its kin.

    Args:
        kl: a role `ref` scores the responses (needed by `kl.place`).
        recompute: the actor scores its responses once more with the training engine, and ratios are taken against
            that; costs a forward pass, and takes differences between sampler and trainer out of the ratio.
        critic: none | own | shared: who says what states are worth.
        dense: the reward gives every token its own (`dense_rewards`) beside the one of the response.
        greedy_baseline: a role `baseline` answers each prompt greedily, and the reward of that answer is taken off
            (ReMax, arXiv:2310.10505).
        ptx: the dataset adds pretraining text to each prompt (needed by `ptx_coef`).
    """
    critic = CriticPlace(critic)  # plain Python may say "own"
    sampled = ("input_ids", "prompt_mask", "loss_mask", "logprobs", "versions", "truncated")
    scored, judged = ("input_ids", "loss_mask"), ("input_ids", "prompt_mask", "row")
    rewards = ("rewards", "dense_rewards") if dense else ("rewards",)
    assigning: list[str] = [*scored, "logprobs", "truncated", *rewards]
    rpcs = [
        RPC("actor_gen", "actor", "generate", inputs=("prompt_ids",), outputs=sampled),
        RPC("reward_inf", "reward", "inference", inputs=judged, outputs=rewards),
    ]
    if greedy_baseline:
        greedy = {"input_ids": "greedy_input_ids", "prompt_mask": "greedy_prompt_mask"}
        answer, verdict = tuple(greedy.values()), {"rewards": "baseline_rewards"}
        rpcs.append(RPC("baseline_gen", "baseline", "generate", ("prompt_ids",), answer, rename=greedy))
        rpcs.append(
            RPC("baseline_inf", "reward", "inference", (*answer, "row"), ("baseline_rewards",), rename=greedy | verdict)
        )
        assigning.append("baseline_rewards")
    if kl:
        rpcs.append(RPC("ref_inf", "ref", "inference", scored, ("ref_logprobs",), rename={"logprobs": "ref_logprobs"}))
        assigning.append("ref_logprobs")
    if recompute:
        rpcs.append(
            RPC("actor_inf", "actor", "inference", scored, ("prox_logprobs",), rename={"logprobs": "prox_logprobs"})
        )
        assigning.append("prox_logprobs")
    if critic is not CriticPlace.none:
        rpcs.append(RPC("critic_inf", "critic", "inference", scored, outputs=("values", "bootstrap_values")))
        assigning += ["values", "bootstrap_values"]
    training, masked = assigning, {}
    if critic is CriticPlace.own:
        masked = {"loss_mask": "train_mask"}
        credited = ("advantages", "returns", "train_mask")
        rpcs.append(RPC("actor_credit", "actor", "credit", tuple(assigning), credited, rename=masked))
        training = [key for key in assigning if key != "loss_mask"] + [*credited]
        learned = ("input_ids", "train_mask", "values", "returns")
        rpcs.append(RPC("critic_train", "critic", "train_step", learned, rename=masked))
    if ptx:
        training = [*training, "ptx_input_ids", "ptx_loss_mask"]
    rpcs.append(RPC("actor_train", "actor", "train_step", tuple(training), rename=masked))
    dataset_keys = ("prompt_ids", "row", *(("ptx_input_ids", "ptx_loss_mask") if ptx else ()))
    return DataflowGraph(tuple(rpcs), dataset_keys=dataset_keys, results=("versions", "truncated"))


__all__ = [
    "CriticPlace",
    "EarlyStop",
    "KLPenalty",
    "KLPlace",
    "PPOActorInterface",
    "ReferenceInterface",
    "RewardShaping",
    "Truncation",
    "ValueObjective",
    "dataflow",
]

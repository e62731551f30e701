"""The pipeline of a policy that samples responses and learns from their rewards: the base of PPO, GRPO and your own.

Training reads the keys that sampling writes and `rewards`, and further keys if the settings need them. Only sampled
tokens are trained. A response with a reward or dense reward that is not finite is excluded, and `missing_rewards`
counts it. A train step is a pipeline of replaceable components:

    score (reward, truncation) -> KL in the reward, dense rewards -> advantage -> adv_norm -> mini-batches;
    objective x correction -> kl and entropy as additional terms -> aggregation

Subclasses extend it in four places: `step_keys`, `prepare_minibatch`, `token_loss` and `credit_stats`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from realign.api import (
    SAMPLED,
    DataflowGraph,
    GenerationConfig,
    Keys,
    LossStats,
    Max,
    Mean,
    MicroBatchSpec,
    Model,
    ModelInterface,
    ModelOutput,
    Plan,
    Role,
    RoleModel,
    SequenceSample,
    Stats,
    TokenValues,
    masked_mean,
    merge_stats,
    rl_graph,
)
from realign.api.router_experts import ROUTER_EXPERTS
from realign.api.sampling_mask import SAMPLING_MASK
from realign.errors import SettingsError
from realign.functional import broadcast_to_tokens, keep_best, segment_sum
from realign.interfaces.components import (
    GAE,
    POLICY_PANELS,
    AdvantageEstimator,
    Aggregation,
    Clip,
    Correction,
    EarlyStop,
    EntropyBonus,
    Estimate,
    KLPenalty,
    Normalization,
    Objective,
    PolicyTokens,
    Rewards,
    RewardShaping,
    TokenMean,
    Truncation,
    advantage_stats,
    first_logprob_diff,
    normalize_advantages,
    old_logprobs,
    policy_loss_of,
    policy_stats,
    score_logprobs,
    scoring_keys,
    select_trained,
    staleness_stats,
)
from realign.interfaces.components.truncation import end_tokens
from realign.interfaces.greedy import GreedyInterface
from realign.interfaces.reference import ReferenceInterface
from realign.settings import Count, NonNegativeInt


@dataclass
class PolicyInterface(ModelInterface):
    """A policy that samples responses and learns from their rewards."""

    OUTPUTS = frozenset({"logprobs"})
    HEADLINE: ClassVar[tuple[str, ...]] = (
        "reward",
        "entropy",
        "clip_fraction",
        "approx_kl",
        "ref_kl_per_sequence",
        "teacher_kl",
    )
    PANELS = POLICY_PANELS
    ALGORITHM_SETTINGS: ClassVar[tuple[str, ...]] = (
        "advantage",
        "adv_norm",
        "credit_per_minibatch",
        "objective",
        "aggregation",
        "kl",
        "reward.baseline",
    )
    reads_images: ClassVar[bool] = True

    generation: GenerationConfig = field(default_factory=GenerationConfig)
    """How to sample responses. `generation.temperature` applies to all log-probs of the policy. With `top_k`, `top_p`
    or `min_p`, log-probs are normalized over the tokens they kept in the rollout."""
    epochs: Count = 1
    """How often to train on each rollout batch."""
    n_minibatches: Count = 1
    """Optimizer steps per pass. Each pass shuffles the prompts."""
    reward: RewardShaping = field(default_factory=RewardShaping)
    """What to do with rewards before advantages: bias, gain, clip, scale, baseline."""
    truncation: Truncation = field(default_factory=Truncation)
    """What to do with responses that hit the length limit."""
    min_response_tokens: NonNegativeInt = 0
    """Drop responses shorter than this from the loss, in tokens including the end token (3 matches DeepSpeed-Chat,
    which drops responses of one token and the end token)."""
    train_end_token: bool = True
    """Train on end tokens. With false, they get rewards and advantages but no loss, as in systems that pad with the end
    token (DeepSpeed-Chat, trlX with GPT-2's tokenizer)."""
    keep_best: Count | None = None
    """Train only on the k highest-scoring responses per prompt (realhf's best-of-k); null trains on all."""
    advantage: AdvantageEstimator = field(default_factory=GAE)
    """Advantage estimator: gae, n_step, group_relative, gdpo, max_rl, turn_returns, or your own."""
    adv_norm: Normalization = field(default_factory=Normalization)
    """How to normalize advantages: over which responses to subtract the mean and divide by the standard deviation."""
    credit_per_minibatch: bool = False
    """Estimate and normalize advantages in each mini-batch on its own (openai/lm-human-preferences)."""
    objective: Objective = field(default_factory=Clip)
    """Policy objective: clip, proximal_kl, gspo, cispo, sapo, gmpo, dppo, reinforce, or your own."""
    correction: Correction | None = None
    """Correct for samples from an older or different policy: importance_correction, or your own; null: don't."""
    recompute: bool = False
    """Recompute old log-probs with the trainer, instead of using the sampler's. `correction` implies it."""
    kl: KLPenalty = field(default_factory=KLPenalty)
    """KL penalty against the reference policy, in the reward or in the loss: kl_penalty, or your own."""
    entropy: EntropyBonus = field(default_factory=EntropyBonus)
    """Entropy bonus in the loss, with a constant weight or one that keeps the entropy near a target."""
    aggregation: Aggregation = field(default_factory=TokenMean)
    """How to average the loss over tokens and sequences: token_mean, seq_mean_token_mean, seq_mean_token_sum or
    constant."""
    early_stop: EarlyStop = field(default_factory=EarlyStop)
    """Bounds beyond which the rest of a rollout batch is skipped."""

    @override
    def ineffective(self) -> dict[str, str]:
        unused = "with generation.fixed_length=true, under which no token ends a response. Set one of them otherwise"
        return {"train_end_token": unused} if self.generation.fixed_length else {}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.generation = self.generation.with_replay()
        self.generation.check_ratios()
        for name, limit in (("min_response_tokens", "max_new_tokens"), ("keep_best", "n")):
            given, most = getattr(self, name), getattr(self.generation, limit)
            if given is not None and given > most:
                raise SettingsError(f"{name}={given}: must be at most generation.{limit}={most}")
        self.truncation.check(longest=self.generation.max_new_tokens, baseline=self.reward.has_baseline)
        self.advantage.check(
            responses=self.generation.n,
            adv_norm=self.adv_norm,
            reward=self.reward,
            truncation=self.truncation,
        )
        self.kl_control = self.kl.control()
        self.entropy_control = self.entropy.control()
        self.objective_control = self.objective.control()
        self.reward_moments = self.reward.moments()

    @override
    def keys(self, method: str) -> Keys:
        """Return the keys that the components read, each with the setting that needs it."""
        replayed = {ROUTER_EXPERTS: "generation.router_replay=true"} if self.generation.router_replay else {}
        if self.generation.sampling_replay:
            replayed[SAMPLING_MASK] = f"generation.{self.generation.distortions()[0]}"
        if method == "generate":
            return Keys({"prompt_ids": ""}, writes=frozenset({*SAMPLED, *replayed}))
        if method == "inference":
            scoring = scoring_keys()
            return replace(scoring, needs={**scoring.needs, **replayed})
        needs = dict.fromkeys(("input_ids", "loss_mask", "logprobs"), "")
        needs |= {"rewards": ""} if self.advantage.needs_rewards else {}
        needs |= {**self.kl.needs(), **self.truncation.needs(), **self.reward.needs()}
        uses = {"prox_logprobs", "truncated", *self.advantage.uses}
        uses |= set() if self.advantage.needs_rewards else {"rewards"}
        uses |= set() if self.reward.shapes_scores else {"dense_rewards"}  # with dense rewards all scores are 0
        if method == "credit":
            return Keys(needs | self.advantage.needs(), frozenset(uses), frozenset(CREDITED))
        needs |= replayed | self.objective.needs() | ({"prox_logprobs": "recompute=true"} if self.recompute else {})
        if self.correction is not None:
            needs, uses = needs | self.correction.needs(), uses | {"versions"}
        step = self.step_keys()
        return Keys({**needs, **step.needs}, frozenset({*uses, *step.uses}))

    def step_keys(self) -> Keys:
        """Return the keys that `train_step` reads for advantages and additional terms of the loss."""
        return Keys(self.advantage.needs())

    @override
    def roles(self) -> Mapping[str, Role]:
        """Return a reference policy, a teacher without a default model, and a greedy policy."""
        return {
            "ref": Role(ReferenceInterface(self.generation.temperature, self.kl.full_vocabulary), RoleModel.start),
            "teacher": Role(ReferenceInterface(self.generation.temperature), RoleModel.none),
            "baseline": Role(GreedyInterface(self.generation), RoleModel.shared),
        }

    @override
    def plan(self) -> Plan:
        longest = self.generation.max_new_tokens
        return Plan(
            epochs=self.epochs,
            n_minibatches=self.n_minibatches,
            at_most=self.early_stop.bounded,
            responses_per_prompt=self.generation.n,
            longest_response=longest,
            expected_response=longest if self.truncation.overlong_buffer else None,
            temperature=self.generation.temperature,
            generation=self.generation,
            sampler=self.generation.describe(),
            corrects_staleness=self.correction is not None,
        )

    @override
    def targets(self) -> dict[str, float]:
        targets = {"ref_kl_per_sequence": self.kl.target, "entropy": self.entropy.target}
        return {metric: target for metric, target in targets.items() if target is not None}

    @override
    def describe(self, batch_prompts: int) -> dict[str, str]:
        trained = [] if self.keep_best is None else [f"the best {self.keep_best} of {self.generation.n} per prompt"]
        trained += [f"those of at least {self.min_response_tokens} tokens"] if self.min_response_tokens else []
        trained += [] if self.train_end_token else ["without their end tokens"]
        return {
            "scores": self.reward.describe(),
            "truncated responses": self.truncation.describe(),
            "responses in the loss": ", ".join(trained),
            "KL to reference": self.kl.describe(),
            "advantage": self.advantage.describe(),
            "advantage normalization": self.adv_norm.describe(per_minibatch=self.credit_per_minibatch),
            "policy objective": self.objective.describe(),
            "importance correction": "" if self.correction is None else self.correction.describe(),
            "entropy bonus": self.entropy.describe(),
            "loss aggregation": self.aggregation.describe(),
            "early stop": self.early_stop.describe(),
        }

    def generate(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Sample `generation.n` responses per prompt; `versions` is the policy version that sampled each token."""
        return model.sampler.generate(data, self.generation, seed=model.call_seed("generate"))

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Compute `logprobs` [T] of the sampled tokens under the current weights."""
        return score_logprobs(model, data, mb_spec, self.generation.temperature)

    def credit(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Compute `advantages` and `returns` [T], and the `loss_mask` [T] of the tokens in the losses."""
        return self.estimate_advantages(model, self.score(model, data)).select(CREDITED)

    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> Stats:
        """Take `epochs * n_minibatches` optimizer steps, in a new random order in each epoch."""
        data = self.with_advantages(model, data)
        stats = self.batch_stats(model, data)
        steps, further = self._optimize(model, data, mb_spec)
        merged = merge_stats([stats, *steps, *further])
        # After the optimizer steps: all of them used one coefficient, that of the metric.
        merged |= self.kl_control.update(merged, model.engine.reduce)
        merged |= self.entropy_control.update(merged, model.engine.reduce)
        if self.objective_control is None:
            return merged
        return merged | self.objective_control.update(model, data, mb_spec, self.generation.temperature)

    def with_advantages(self, model: Model, data: SequenceSample) -> SequenceSample:
        """Return the batch with advantages, unless every mini-batch estimates its own."""
        if "advantages" in data:
            return data
        data = self.score(model, data)
        return data if self.credit_per_minibatch else self.estimate_advantages(model, data)

    def score(self, model: Model, data: SequenceSample) -> SequenceSample:
        """Shape `rewards`, and remove excluded responses from `loss_mask`. Called once per rollout batch.

        Without rewards (`AdvantageEstimator.needs_rewards`), all of them are 0.
        """
        if "rewards" not in data and not self.advantage.needs_rewards:
            data = data.with_sequences(rewards=torch.zeros(data.n_sequences, device=data["loss_mask"].device))
        cu_seqlens, rewards_S, truncated_S = data.cu_seqlens(), Rewards.read_rewards(data), data.get("truncated")
        tokens_S = segment_sum(data["loss_mask"], cu_seqlens)
        # At least 1: a response without a trained token has no gradient, but would move the statistics of its group.
        valid_S = rewards_S.isfinite() & (tokens_S >= max(1, self.min_response_tokens))
        self.reward.observe(self.reward_moments, rewards_S, data.once_per_episode(valid_S), model.engine.reduce)
        scores_S = self.reward.shape(self.reward_moments, rewards_S)
        scores_S = self.truncation.scores(scores_S, truncated_S, tokens_S, self.generation.max_new_tokens)
        scores_S = scores_S - self.reward.baselines(self.reward_moments, data)
        # A greedy response without a reward makes the scores of its prompt NaN.
        valid_S = valid_S & scores_S.isfinite() & self.truncation.keep_in_loss(valid_S, truncated_S)
        if self.keep_best is not None:
            # With dense rewards, but without the KL penalty, which the advantage subtracts later.
            total_S = Rewards.of(data.with_sequences(rewards=scores_S)).per_sequence
            best_S = keep_best(total_S, data.group_index(), data.once_per_episode(valid_S), self.keep_best)
            valid_S = valid_S & data.of_whole_episodes(best_S)
        mask_T = data["loss_mask"] & broadcast_to_tokens(valid_S, cu_seqlens)
        return data.with_sequences(rewards=scores_S).with_tokens(loss_mask=mask_T)

    def estimate_advantages(self, model: Model, data: SequenceSample) -> SequenceSample:
        """Add normalized `advantages` [T], and `returns` [T] if the estimator computes them.

        With train_end_token=false, end tokens leave `loss_mask` after that.
        """
        cu_seqlens, reduce = data.cu_seqlens(), model.engine.reduce
        valid_S = data["rewards"].isfinite() & (segment_sum(data["loss_mask"], cu_seqlens) > 0)
        if (kept_S := self.advantage.keep(data)) is not None:
            valid_S = valid_S & kept_S
        data = data.with_tokens(loss_mask=data["loss_mask"] & broadcast_to_tokens(valid_S, cu_seqlens))
        rewards = Rewards.of(data, *self.kl_control.in_reward(data))
        estimated = self.advantage.estimate(rewards, data, reduce)
        estimate = Estimate.of(estimated, cu_seqlens, type(self.advantage).__name__)
        advantages_T = normalize_advantages(estimate, data, valid_S, self.adv_norm, reduce)
        # After `adv_norm`, which would divide a constant factor away.
        if (factor := self.advantage.rescale(rewards, data, valid_S, reduce)) is not None:
            advantages_T = advantages_T * factor
        returns = {} if estimate.returns_T is None else {"returns": estimate.returns_T}
        if not self.train_end_token:
            stops = self.generation.stop_token_ids
            # After the advantages, so that a reward at the end token still reaches the tokens before it.
            ends_T = end_tokens(model, data["input_ids"], stops, "train_end_token=false")
            data = data.with_tokens(loss_mask=data["loss_mask"] & ~ends_T)
        return data.with_tokens(advantages=advantages_T, **returns)

    def _optimize(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> tuple[list[Stats], list[Stats]]:
        """Take the optimizer steps of a rollout batch until `early_stop`. Returns their metrics and additional ones."""
        allowed = True

        def step_if(stats: Stats) -> bool:
            nonlocal allowed
            allowed = self.early_stop.allows(stats)
            return allowed

        data = self.training_sequences(data)
        if not self.adds_to_objective():
            mb_spec = replace(mb_spec, zero_key="advantages")
        reduce, rng = model.engine.reduce, np.random.default_rng(model.call_seed("minibatches"))
        steps, further = list[Stats](), list[Stats]()
        # lazy, so that an early stop also skips the permutation of later epochs
        for part in (part for _ in range(self.epochs) for part in data.minibatches(self.n_minibatches, rng)):
            if self.credit_per_minibatch:
                part = self.estimate_advantages(model, part)
                further.append(self.credit_stats(model, part))
            part = self.prepare_minibatch(part, reduce)
            # Only before the first update does the policy that trains equal the one that sampled.
            loss = self.loss if steps else self.first_loss
            steps.append(model.engine.train_batch(part, mb_spec, loss, self.loss_weight, step_if))
            if not allowed:
                break
        if self.early_stop.bounded:
            further.append({"early_stopped": Max(torch.tensor(float(not allowed)))})
        return steps, further

    def adds_to_objective(self) -> bool:
        """Return whether tokens with an advantage of 0 have a gradient, from another term of the loss.

        It affects how passes are divided, not what they compute (ADR 52).
        """
        return self.kl_control.is_in_loss or self.objective.has_kl or bool(self.entropy_control.coef)

    def training_sequences(self, data: SequenceSample) -> SequenceSample:
        """Return the sequences to cut into mini-batches: those with a token in the loss."""
        return select_trained(data)

    def prepare_minibatch(self, minibatch: SequenceSample, reduce: Callable[[Tensor], Tensor]) -> SequenceSample:
        """Add what the loss reads beyond the batch, such as statistics of the whole mini-batch."""
        return self.objective.prepare(minibatch, reduce)

    def loss(self, output: ModelOutput, minibatch: SequenceSample) -> tuple[Tensor, LossStats]:
        """Return the aggregated `token_loss`, summed over the micro-batch, and metrics."""
        weight_T, divisor_T = None, minibatch["loss_mask"]
        if self.correction is not None:
            weight_T, mask_T, divisor_T = self.correction.correct(minibatch)
            # A rejected token has no loss at all, KL and entropy terms included.
            minibatch = minibatch.with_tokens(loss_mask=mask_T)
        loss_T, stats = self.token_loss(output, minibatch, weight_T)
        loss_T = torch.where(minibatch["loss_mask"], loss_T, 0)
        # Not `loss_mask`: with `keep_in_divisor`, rejected tokens have no loss and still count.
        return self.aggregation.total(loss_T, divisor_T, minibatch.cu_seqlens()), stats

    def token_loss(
        self, output: ModelOutput, minibatch: SequenceSample, weight_T: Tensor | None
    ) -> tuple[Tensor, LossStats]:
        """Return the loss [T] (objective times importance weight, plus other terms), and metrics."""
        mask_T, old_T, temperature = minibatch["loss_mask"], old_logprobs(minibatch), self.generation.temperature
        logprobs_T, entropy_T = output.logprobs_and_entropy(temperature=temperature, where_T=mask_T)
        control = self.objective_control
        tokens = PolicyTokens.of(logprobs_T, old_T, minibatch, None if control is None else control.coef)
        # The weight applies to the objective only; the KL and entropy terms below are not weighted.
        policy = policy_loss_of(self.objective, tokens, weight_T)
        loss_T, stats = policy.loss_T, policy_stats(policy, tokens, entropy_T) | self.objective.stats(policy, tokens)
        trace = {"ratio": policy.ratio_T, "entropy": entropy_T, "advantage": tokens.advantages_T, "mask": mask_T}
        trace["logprob"] = logprobs_T
        if self.kl_control.is_in_loss:
            penalty_T, kl_stats = self.kl_control.in_loss(output, logprobs_T, minibatch, temperature)
            loss_T, stats, trace["kl_penalty"] = loss_T + penalty_T, stats | kl_stats, penalty_T
        if coef := self.entropy_control.coef:
            loss_T = loss_T - coef * entropy_T
        return loss_T, {**stats, **token_traces(trace)}

    def first_loss(self, output: ModelOutput, minibatch: SequenceSample) -> tuple[Tensor, LossStats]:
        """Return `loss` with `first_logprob_diff_max`, which checks the ratio on the first mini-batch of a step."""
        loss, stats = self.loss(output, minibatch)
        return loss, {**stats, **first_logprob_diff(stats, output, minibatch, self.generation.temperature)}

    def loss_weight(self, data: SequenceSample) -> Tensor:
        """Return the divisor of the loss, after all filters and the correction."""
        divisor_T = data["loss_mask"] if self.correction is None else self.correction.correct(data).divisor_T
        return self.aggregation.weight(divisor_T, data.cu_seqlens())

    def batch_stats(self, model: Model, data: SequenceSample) -> Stats:
        """Compute the metrics of the rollout batch."""
        mask_T, cu_seqlens = data["loss_mask"], data.cu_seqlens()
        trained_S = segment_sum(mask_T, cu_seqlens) > 0
        # Minus the log-prob of a sample is an unbiased estimate of the entropy, at no cost.
        surprise_S = segment_sum(torch.where(mask_T, -data["logprobs"], 0), cu_seqlens)
        stats: list[Stats] = [
            {"trained_fraction": trained_fraction(data, trained_S)},
            {"entropy_per_sequence": masked_mean(surprise_S, trained_S)},
            self.advantage.stats(data),
            self.kl_control.stats(data),
            self.credit_stats(model, data) if "advantages" in data else {},
            {} if self.correction is None else self.correction.stats(data),
            staleness_stats(data, model.version) if self.correction is not None and "versions" in data else {},
        ]
        return merge_stats(stats)

    def credit_stats(self, model: Model, data: SequenceSample) -> Stats:
        """Compute the metrics of advantages."""
        return advantage_stats(data)

    def state_dict(self) -> dict[str, Any]:
        """Return the coefficients of KL and entropy, and the running moments of the scores."""
        control = {} if self.objective_control is None else {"objective": self.objective_control.state_dict()}
        control |= {"entropy": state} if (state := self.entropy_control.state_dict()) else {}
        kl_state, moments = self.kl_control.state_dict(), self.reward.state_of(self.reward_moments)
        return {"kl_controller": kl_state, "reward": moments, **control}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.kl_control.load_state_dict(state["kl_controller"])
        self.entropy_control.load_state_dict(state.get("entropy", {}))
        self.reward.restore(self.reward_moments, state["reward"])
        if self.objective_control is not None:
            self.objective_control.load_state_dict(state.get("objective", {}))


CREDITED = ("advantages", "returns", "loss_mask")
"""Keys that `credit` writes."""


def trained_fraction(data: SequenceSample, trained_S: Tensor) -> Mean:
    """Return the fraction of the episodes with a trained sequence."""
    every_S = torch.ones_like(trained_S)
    return Mean(data.once_per_episode(trained_S).sum().float(), data.once_per_episode(every_S).sum())


def token_traces(trace: Mapping[str, Tensor]) -> dict[str, TokenValues]:
    """Return values of tokens [T] as metrics, from which the engine keeps those of traced prompts."""
    return {f"token/{name}": TokenValues(x_T.detach()) for name, x_T in trace.items()}


def dataflow(interfaces: Mapping[str, ModelInterface]) -> DataflowGraph:
    """Build the graph of PPO and its variants: sample, reward, score, train. The settings determine the calls."""
    return rl_graph(interfaces)


__all__ = ["PolicyInterface", "dataflow"]

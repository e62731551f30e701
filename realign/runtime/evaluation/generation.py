"""`Evaluation`: sample responses to held-out prompts and score them, outside the training graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from realign.api import (
    RPC,
    DataflowGraph,
    GenerationConfig,
    Mean,
    MicroBatchSpec,
    Model,
    ModelInterface,
    SequenceSample,
    Stats,
    masked_mean,
    merge_stats,
    stat_values,
)
from realign.api.rewards import NAMED, named_rewards, total_rewards
from realign.api.stats import masked_std
from realign.engines.distributed.ranks import current
from realign.errors import ConfigError, SettingsError
from realign.functional import segment_sum
from realign.functional.pass_at_k import pass_at_k
from realign.runtime.calls import call
from realign.runtime.evaluation.base import Evaluator, LoadedRun
from realign.settings import Finite

SEQUENCE_METRICS = frozenset({"reward", "missing_rewards", "response_tokens", "truncated_fraction"})


@dataclass
class Evaluation(Evaluator):
    """Evaluation of sampled responses: prompts, sampling settings and reward functions."""

    reads_images: ClassVar[bool] = True

    reward: ModelInterface | None = None
    """Interface that scores each response; its `inference` must write `rewards`. null: the RPCs of the graph that lead
    to `rewards` score the responses, as in training."""
    generation: GenerationConfig = field(default_factory=lambda: GenerationConfig(greedy=True))
    """Sampling settings. Any are allowed, because the samples are not trained on."""
    metrics: dict[str, ModelInterface] = field(default_factory=dict)
    """Additional scoring interfaces by metric name; `eval/<name>` is the mean of the `rewards` that the interface
    writes."""
    sweep: dict[str, list[Any]] = field(default_factory=dict)
    """One field of `generation` with additional values to evaluate, such as `{max_new_tokens: [16, 64]}`. The metric
    names contain the value: `eval/reward@max_new_tokens=16`."""
    pass_at: list[int] = field(default_factory=list)
    """Values of k for `eval/pass@k`, the probability that one of k responses is correct. Each needs `generation.n` of
    at least k."""
    success: Finite = 1.0
    """Minimum reward of a correct response, for `pass_at`."""
    success_of: str | None = None
    """Name of the reward function that decides whether a response is correct; null: the total reward."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if taken := sorted(self.metrics.keys() & SEQUENCE_METRICS):
            raise SettingsError(f"metrics.{taken[0]}: the evaluation already has this metric. Choose another name.")
        self._variants = self._checked_sweep()
        for k in self.pass_at:
            if k < 1:
                raise SettingsError(f"pass_at=[{k}]: k must be at least 1")
            for variant in self._variants.values():
                if k > variant.n:
                    raise SettingsError(f"pass_at=[{k}]: needs at least {k} responses per prompt. Set generation.n={k}")
        if not self.pass_at and (self.success != 1.0 or self.success_of is not None):
            name = "success_of" if self.success_of is not None else "success"
            raise SettingsError(f"{name}: it has no effect with pass_at=[]. Set pass_at")

    @property
    def judges(self) -> dict[str, ModelInterface]:
        """See `Evaluator`."""
        own = {} if self.reward is None else {"reward": self.reward}
        return own | {f"metrics.{name}": judge for name, judge in self.metrics.items()}

    def check(self, graph: DataflowGraph, models: Iterable[str]) -> None:
        """See `Evaluator`; also checks that the graph can score responses if `reward` is not set."""
        super().check(graph, models)
        if self.reward is None:
            _scoring(graph)
        names = _named(self.reward, graph)
        if self.success_of is not None and f"{NAMED}{self.success_of}" not in names:
            known = ", ".join(sorted(name.removeprefix(NAMED) for name in names)) or "none"
            raise SettingsError(f"success_of={self.success_of}: no reward function has this name (valid: {known})")

    @property
    def longest_response(self) -> int:
        """See `Evaluator`."""
        return max(generation.max_new_tokens for generation in self._variants.values())

    def _checked_sweep(self) -> dict[str, GenerationConfig]:
        """Return the generation settings for each suffix of the metric names."""
        if len(self.sweep) > 1:
            raise SettingsError(f"sweep: it accepts one setting, found {', '.join(self.sweep)}. Remove the others.")
        variants = {"": self.generation}
        for name, values in self.sweep.items():
            known = [field.name for field in dataclasses.fields(GenerationConfig)]
            if name not in known:
                raise SettingsError(f"sweep.{name}: unknown field of generation (valid: {', '.join(known)})")
            if self.generation.greedy and name in ("temperature", "top_k", "top_p"):
                raise SettingsError(
                    f"sweep.{name}: it has no effect with generation.greedy=true. Set generation.greedy=false."
                )
            if not values:
                raise SettingsError(f"sweep.{name}=[]: it has no values. Add at least one.")
            for value in values:
                try:
                    variants[f"@{name}={value}"] = dataclasses.replace(self.generation, **{name: value})
                except SettingsError as error:
                    raise SettingsError(f"sweep.{error}") from error
                except TypeError as error:
                    raise SettingsError(f"sweep.{name}: {value!r} is not a valid value ({error})") from error
        return variants

    def metric_names(self, graph: DataflowGraph) -> frozenset[str] | None:
        """See `Evaluator`."""
        names = [*SEQUENCE_METRICS, *self.metrics, *named_metrics(_named(self.reward, graph))]
        return frozenset(
            f"eval/{name}{ending}"
            for ending, generation in self._variants.items()
            for name in (*names, *_group_metrics(generation.n, self.pass_at))
        )

    def describe(self) -> str:
        """See `Evaluator`."""
        passes = f"; pass@{', pass@'.join(map(str, self.pass_at))}" if self.pass_at else ""
        several = f", {self.generation.n} responses per prompt" if self.generation.n > 1 else ""
        swept = "".join(f"; also {name}={', '.join(map(str, values))}" for name, values in self.sweep.items())
        return self.generation.describe() + several + passes + swept

    def measure(self, runtime: LoadedRun, dataset: Any) -> tuple[dict[str, float], SequenceSample]:
        """See `Evaluator`."""
        return self.run(runtime.models[self.role], dataset, runtime)

    def run(
        self, model: Model, dataset: Any, runtime: LoadedRun | None = None
    ) -> tuple[dict[str, float], SequenceSample]:
        """Sample and score responses to every prompt of `dataset` once.

        Args:
            model: model that samples.
            dataset: the prompts.
            runtime: the loaded run; needed only if `reward` is not set.

        Returns:
            The metrics `eval/...`, and the scored responses of the first batch.
        """
        values: dict[str, float] = {}
        shown: SequenceSample | None = None
        for ending, generation in self._variants.items():
            stats: list[Stats] = []
            for number, prompts in enumerate(self.batches(dataset)):
                seed = model.call_seed(f"evaluation/{number}")
                answered = model.sampler.generate(prompts.select(["prompt_ids"]), generation, seed=seed)
                answered = answered.merge(prompts.select(["row"]))
                judged, found = self._judge(model, answered, runtime)
                shown = shown or judged
                stats.append(sequence_stats(judged) | found | self._group_stats(judged, generation.n))
            values |= {f"eval/{name}{ending}": value for name, value in stat_values(merge_stats(stats)).items()}
        assert shown is not None
        return values, shown

    def _judge(self, model: Model, answered: SequenceSample, runtime: LoadedRun | None) -> tuple[SequenceSample, Stats]:
        """Return the responses with their rewards, and the statistics of the additional metrics."""
        judge = Model("evaluation", None, model.tokenizer, model.seed, model.version)

        def verdicts() -> tuple[SequenceSample | None, Stats]:
            stats: Stats = {}
            for name, interface in self.metrics.items():
                found_S = interface.inference(judge, answered, MicroBatchSpec())["rewards"]
                stats[name] = masked_mean(found_S, found_S.isfinite())
            scored = None if self.reward is None else self.reward.inference(judge, answered, MicroBatchSpec())
            return scored, stats

        scored, stats = current().lead(verdicts)
        if scored is not None:
            return answered.merge(scored), stats
        assert runtime is not None
        sampling, scoring = _scoring(runtime.graph)
        batch = answered.rename({ours: theirs for ours, theirs in sampling.rename.items() if ours in answered})
        for rpc in scoring:
            model, interface = runtime.models[rpc.model], runtime.interfaces[rpc.model]
            batch, _ = call(rpc, model, interface, batch, runtime.microbatch, runtime.graph)
        return batch.rename({theirs: ours for ours, theirs in sampling.rename.items() if theirs in batch}), stats

    def _group_stats(self, judged: SequenceSample, n: int) -> Stats:
        """Return pass@k and the mean over the `n` responses per prompt, each a mean over prompts."""
        names = _group_metrics(n, self.pass_at)
        if not names:
            return {}
        group_S, rewards_S = judged.group_index(), total_rewards(judged)
        decisive_S = rewards_S if self.success_of is None else judged[f"{NAMED}{self.success_of}"]
        present_S = rewards_S.isfinite() & decisive_S.isfinite()

        def per_prompt(x_S: Tensor) -> Tensor:
            return torch.zeros(len(judged), dtype=torch.float64).index_add_(0, group_S, x_S.double())

        n_G = per_prompt(present_S)
        correct_G = per_prompt(present_S & (decisive_S >= self.success))
        mean_G = per_prompt(torch.where(present_S, rewards_S, 0)) / n_G
        values = [mean_G, *(pass_at_k(n_G.long(), correct_G.long(), k) for k in self.pass_at)]
        return {name: masked_mean(x_G, x_G.isfinite()) for name, x_G in zip(names, values, strict=True)}


def _scoring(graph: DataflowGraph) -> tuple[RPC, list[RPC]]:
    """Return the RPC that samples, and the RPCs that score its responses, in execution order.

    Raises:
        ConfigError: the graph has no such RPCs.
    """
    leading = graph.leading_to("rewards")
    sampling = [rpc for rpc in leading if rpc.method == "generate"]
    if len(sampling) != 1 or "rewards" in sampling[0].outputs:
        why = "no RPC of the graph writes rewards" if not leading else "the graph samples and scores in one RPC"
        cure = "Use realign.runtime.EpisodeEvaluation" if leading else "Set it to an interface that scores responses"
        raise ConfigError(f"reward is not set, and {why}. {cure}.")
    return sampling[0], [rpc for rpc in leading if rpc.method != "generate"]


def _named(reward: ModelInterface | None, graph: DataflowGraph) -> frozenset[str]:
    """Return the keys of the named rewards of an evaluation."""
    if reward is not None:
        return reward.keys("inference").reports
    return frozenset(key for rpc in graph.leading_to("rewards") for key in rpc.outputs if key.startswith(NAMED))


def named_metrics(keys: Iterable[str]) -> list[str]:
    """Return the metrics of named rewards, see `sequence_stats`."""
    return [f"{key}/{what}" for key in sorted(keys) for what in ("mean", "std")]


def _group_metrics(n: int, pass_at: Iterable[int]) -> list[str]:
    """Return the metrics that need several responses per prompt."""
    passes = [f"pass@{k}" for k in pass_at]
    return [f"mean@{n}", *passes] if n > 1 or passes else []


def sequence_stats(batch: SequenceSample) -> Stats:
    """Return metrics of sampled sequences, for the keys that the batch contains; each is a mean over its sequences.

    - `reward`: total reward, over the responses with a reward
    - `rewards/<name>/mean`, `rewards/<name>/std`: mean and population standard deviation of a named reward
    - `missing_rewards`: fraction of responses without a reward
    - `response_tokens`: tokens outside the prompt mask, also of responses without a reward
    - `truncated_fraction`: fraction of truncated responses
    - `turns`: policy turns of a multi-turn episode
    """
    stats: Stats = {}
    if "rewards" in batch:
        rewards_S = total_rewards(batch)
        present_S = rewards_S.isfinite()
        stats["reward"] = masked_mean(rewards_S, present_S)
        stats["missing_rewards"] = _mean((~present_S).float())
    if "input_ids" in batch:
        for key, named_S in named_rewards(batch).items():
            stats[f"{key}/mean"] = masked_mean(named_S, named_S.isfinite())
            stats[f"{key}/std"] = masked_std(named_S, named_S.isfinite())
    if "prompt_mask" in batch:
        tokens_S = segment_sum((~batch["prompt_mask"]).float(), batch.cu_seqlens())
        stats["response_tokens"] = _mean(tokens_S)
    if "truncated" in batch:
        stats["truncated_fraction"] = _mean(batch["truncated"].float())
    if "turns" in batch:
        stats["turns"] = _mean(batch["turns"].float())
    return stats


def _mean(x_S: Tensor) -> Mean:
    return masked_mean(x_S, torch.ones_like(x_S, dtype=torch.bool))

"""`Evaluation`: sample responses to held-out prompts and score them, outside the training graph."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from realign.api import RPC, DataflowGraph, GenerationConfig, MicroBatchSpec, Model, ModelInterface, SequenceSample
from realign.api.rewards import NAMED, Verifier
from realign.api.sample import with_own_metadata
from realign.errors import ConfigError, SettingsError
from realign.ranks import current
from realign.runtime.calls import call
from realign.runtime.evaluation.base import LoadedRun, SamplingEvaluator
from realign.runtime.evaluation.scores import (
    SEQUENCE_METRICS,
    Scored,
    check_pass_at,
    group_metrics,
    group_values,
    named_metrics,
)
from realign.settings import Count, Finite


@dataclass
class Evaluation(SamplingEvaluator):
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
    pass_at: list[Count] = field(default_factory=list)
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
        self._variants = self._check_sweep()
        for variant in self._variants.values():
            check_pass_at(self.pass_at, variant.n, "generation.n")

    @override
    def ineffective(self) -> dict[str, str]:
        unused = "with pass_at=[]. Set pass_at"
        reasons = {} if self.pass_at else {"success": unused, "success_of": unused}
        if self.generation.greedy and self.sweep.keys() <= {"temperature", "top_k", "top_p", "min_p"}:
            reasons["sweep"] = "with generation.greedy=true. Set generation.greedy=false"
        return reasons

    @property
    @override
    def judges(self) -> dict[str, ModelInterface]:
        own = {} if self.reward is None else {"reward": self.reward}
        return own | {f"metrics.{name}": judge for name, judge in self.metrics.items()}

    @override
    def check(self, graph: DataflowGraph, models: Iterable[str]) -> None:
        """Also check that the graph can score responses if `reward` is not set."""
        super().check(graph, models)
        if self.reward is None:
            _find_scoring_calls(graph)
        names = _named_rewards(self.reward, graph)
        if self.success_of is not None and f"{NAMED}{self.success_of}" not in names:
            known = ", ".join(sorted(name.removeprefix(NAMED) for name in names)) or "none"
            raise SettingsError(f"success_of={self.success_of}: no reward function has this name (valid: {known})")

    @property
    @override
    def longest_response(self) -> int:
        return max(generation.max_new_tokens for generation in self._variants.values())

    def _check_sweep(self) -> dict[str, GenerationConfig]:
        """Return the generation settings for each suffix of the metric names."""
        if len(self.sweep) > 1:
            raise SettingsError(f"sweep: it accepts one setting, found {', '.join(self.sweep)}. Remove the others.")
        variants = {"": self.generation}
        for name, values in self.sweep.items():
            known = [field.name for field in dataclasses.fields(GenerationConfig)]
            if name not in known:
                raise SettingsError(f"sweep.{name}: unknown field of generation (valid: {', '.join(known)})")
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

    @override
    def metric_names(self, graph: DataflowGraph) -> frozenset[str] | None:
        names = [*SEQUENCE_METRICS, *self.metrics, *named_metrics(_named_rewards(self.reward, graph))]
        return frozenset(
            f"eval/{name}{ending}"
            for ending, generation in self._variants.items()
            for name in (*names, *group_metrics(generation.n, self.pass_at))
        )

    @override
    def describe(self) -> str:
        passes = f"; pass@{', pass@'.join(map(str, self.pass_at))}" if self.pass_at else ""
        several = f", {self.generation.n} responses per prompt" if self.generation.n > 1 else ""
        swept = "".join(f"; also {name}={', '.join(map(str, values))}" for name, values in self.sweep.items())
        return self.generation.describe() + several + passes + swept

    @override
    def calls(self, graph: DataflowGraph) -> list[RPC]:
        return [] if self.reward is not None else _find_scoring_calls(graph)[1]

    @override
    def score(self, runtime: LoadedRun, dataset: Any) -> Iterator[Scored]:
        model = runtime.models[self.role]
        for ending, generation in self._variants.items():
            for number, prompts in enumerate(self.batches(dataset)):
                # without `ending`: the variants of a sweep use the same random numbers, so they differ in the swept
                # setting only
                seed = model.call_seed(f"evaluation/{number}")
                answered = model.sampler.generate(prompts.select(["prompt_ids"]), generation, seed=seed)
                answered = answered.merge(prompts.select(["row"]))
                judged, further = self._judge(runtime, answered)
                decisive_S = None if self.success_of is None else judged[f"{NAMED}{self.success_of}"]
                grouped = group_values(judged, generation.n, self.pass_at, self.success, decisive_S)
                yield Scored(judged, ending, further, grouped)

    @override
    def constant_reward(self, runtime: LoadedRun, dataset: Any, response: Tensor) -> float | None:
        """Ask only functions that are cheap, see `Verifier.is_cheap`."""
        model, judge = runtime.models[self.role], self.reward
        if judge is None:
            scoring = _find_scoring_calls(runtime.graph)[1]
            judge = runtime.interfaces[scoring[0].model] if len(scoring) == 1 else None
        if not isinstance(judge, Verifier) or not judge.is_cheap():
            return None
        text = model.tokenizer.decode(response, skip_special_tokens=True)
        rewards = [
            current().lead(partial(judge.score_texts, model, prompts, [[text]] * len(prompts)))
            for prompts in self.batches(dataset)
        ]
        mean = float(torch.cat(rewards).nanmean())
        return mean if math.isfinite(mean) else None

    def _judge(self, runtime: LoadedRun, answered: SequenceSample) -> tuple[SequenceSample, Mapping[str, Tensor]]:
        """Return the responses with their rewards, and the rewards [S] of the additional metrics."""
        model = runtime.models[self.role]
        # no engine: what scores here must not depend on the policy that it judges
        judge = Model("evaluation", None, model.tokenizer, model.seed, model.version)

        def verdicts() -> tuple[SequenceSample | None, Mapping[str, Tensor]]:
            rewards = {
                name: interface.inference(judge, with_own_metadata(answered), MicroBatchSpec())["rewards"]
                for name, interface in self.metrics.items()
            }
            scored = None if self.reward is None else self.reward.inference(judge, answered, MicroBatchSpec())
            return scored, rewards

        scored, further = current().lead(verdicts)
        if scored is not None:
            return answered.merge(scored), further
        sampling, scoring = _find_scoring_calls(runtime.graph)
        batch = answered.rename({ours: theirs for ours, theirs in sampling.rename.items() if ours in answered})
        for rpc in scoring:
            model, interface = runtime.models[rpc.model], runtime.interfaces[rpc.model]
            batch, _ = call(rpc, model, interface, batch, runtime.microbatch, runtime.graph)
        return batch.rename({theirs: ours for ours, theirs in sampling.rename.items() if theirs in batch}), further


def _find_scoring_calls(graph: DataflowGraph) -> tuple[RPC, list[RPC]]:
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


def _named_rewards(reward: ModelInterface | None, graph: DataflowGraph) -> frozenset[str]:
    """Return the keys of the named rewards of an evaluation."""
    if reward is not None:
        return reward.keys("inference").reports
    return frozenset(key for rpc in graph.leading_to("rewards") for key in rpc.outputs if key.startswith(NAMED))

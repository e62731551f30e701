"""`EpisodeEvaluation`: run environment episodes on held-out rows, outside the training graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from realign.api import DataflowGraph, MicroBatchSpec, ModelInterface, derive_seed
from realign.runtime.evaluation.base import LoadedRun, SamplingEvaluator
from realign.runtime.evaluation.scores import (
    FAILURES,
    SEQUENCE_METRICS,
    Scored,
    check_pass_at,
    group_metrics,
    group_values,
    named_metrics,
)
from realign.settings import Count, Finite


@dataclass
class EpisodeEvaluation(SamplingEvaluator):
    """Evaluates a role in an environment, with sampling settings of its own."""

    episodes: ModelInterface = field(kw_only=True)
    """Interface that samples and scores episodes, such as `EnvironmentInterface`. Any sampling settings are allowed,
    because the samples are not trained on."""
    pass_at: list[Count] = field(default_factory=list)
    """Values of k for `eval/pass@k`, the probability that one of k episodes succeeds. Each needs at least k episodes
    per row."""
    success: Finite = 1.0
    """Minimum reward of an episode that succeeds, for `pass_at`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pass_at(self.pass_at, self._n, "episodes.generation.n")

    @override
    def ineffective(self) -> dict[str, str]:
        return {} if self.pass_at else {"success": "with pass_at=[]. Set pass_at"}

    @property
    def _n(self) -> int:
        return self.episodes.plan().responses_per_prompt or 1

    @property
    @override
    def judges(self) -> dict[str, ModelInterface]:
        return {"episodes": self.episodes}

    @property
    @override
    def longest_response(self) -> int:
        return self.episodes.plan().longest_response

    @property
    @override
    def length_setting(self) -> str:
        return f"episodes.{self.episodes.plan().length_setting}"

    @override
    def metric_names(self, graph: DataflowGraph) -> frozenset[str] | None:
        named = named_metrics(self.episodes.keys("generate").reports)
        names = (*SEQUENCE_METRICS, "turns", *FAILURES, *named, *group_metrics(self._n, self.pass_at))
        return frozenset(f"eval/{name}" for name in names)

    @override
    def describe(self) -> str:
        passes = f"; pass@{', pass@'.join(map(str, self.pass_at))}" if self.pass_at else ""
        return f"{self._n} episodes per row, {self.episodes.plan().sampler or 'sampler not declared'}{passes}"

    @override
    def score(self, runtime: LoadedRun, dataset: Any) -> Iterator[Scored]:
        model = runtime.models[self.role]
        for number, rows in enumerate(self.batches(dataset)):
            # `generate` derives its seeds from the model's, so batches would otherwise repeat their random numbers
            player = model.replaced(seed=derive_seed(model.seed, "evaluation", number))
            played = self.episodes.generate(player, rows, MicroBatchSpec())
            grouped = group_values(played, self._n, self.pass_at, self.success)
            yield Scored(played, per_prompt=grouped)

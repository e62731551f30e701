"""`EpisodeEvaluation`: run environment episodes on held-out rows, outside the training graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from realign.api import DataflowGraph, MicroBatchSpec, ModelInterface, derive_seed
from realign.runtime.evaluation.base import LoadedRun, SamplingEvaluator
from realign.runtime.evaluation.scores import SEQUENCE_METRICS, Scored, named_metrics


@dataclass
class EpisodeEvaluation(SamplingEvaluator):
    """Evaluates a role in an environment, with sampling settings of its own."""

    episodes: ModelInterface = field(kw_only=True)
    """Interface that samples and scores episodes, such as `EnvironmentInterface`. Any sampling settings are allowed,
    because the samples are not trained on."""

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
        return frozenset(f"eval/{name}" for name in (*SEQUENCE_METRICS, "turns", *named))

    @override
    def describe(self) -> str:
        plan = self.episodes.plan()
        return f"{plan.responses_per_prompt or 1} episodes per row, {plan.sampler or 'sampler not declared'}"

    @override
    def scored(self, runtime: LoadedRun, dataset: Any) -> Iterator[Scored]:
        model = runtime.models[self.role]
        for number, rows in enumerate(self.batches(dataset)):
            # `generate` derives its seeds from the model's, so batches would otherwise repeat their random numbers
            player = model.replaced(seed=derive_seed(model.seed, "evaluation", number))
            yield Scored(self.episodes.generate(player, rows, MicroBatchSpec()))

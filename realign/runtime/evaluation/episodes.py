"""`EpisodeEvaluation`: run environment episodes on held-out rows, outside the training graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from realign.api import DataflowGraph, MicroBatchSpec, ModelInterface, derive_seed
from realign.runtime.evaluation.base import LoadedRun, SamplingEvaluator
from realign.runtime.evaluation.scores import SEQUENCE_METRICS, Scored, named_metrics


@dataclass
class EpisodeEvaluation(SamplingEvaluator):
    """Evaluation of a role in an environment, with separate sampling settings (config node)."""

    episodes: ModelInterface = field(kw_only=True)
    """Interface that samples and scores episodes, such as `EnvironmentInterface`. Any sampling settings are allowed,
    because the samples are not trained on."""

    @property
    def judges(self) -> dict[str, ModelInterface]:
        """See `Evaluator`."""
        return {"episodes": self.episodes}

    @property
    def longest_response(self) -> int:
        """See `Evaluator`."""
        return self.episodes.plan().longest_response

    @property
    def length_setting(self) -> str:
        """See `Evaluator`."""
        return f"episodes.{self.episodes.plan().length_setting}"

    def metric_names(self, graph: DataflowGraph) -> frozenset[str] | None:
        """See `Evaluator`."""
        named = named_metrics(self.episodes.keys("generate").reports)
        return frozenset(f"eval/{name}" for name in (*SEQUENCE_METRICS, "turns", *named))

    def describe(self) -> str:
        """See `Evaluator`."""
        plan = self.episodes.plan()
        return f"{plan.responses_per_prompt or 1} episodes per row, {plan.sampler or 'sampler not declared'}"

    def scored(self, runtime: LoadedRun, dataset: Any) -> Iterator[Scored]:
        """See `SamplingEvaluator`."""
        model = runtime.models[self.role]
        for number, rows in enumerate(self.batches(dataset)):
            player = replace(model, seed=derive_seed(model.seed, "evaluation", number))
            yield Scored(self.episodes.generate(player, rows, MicroBatchSpec()))

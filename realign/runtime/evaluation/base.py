"""`Evaluator`: what every kind of evaluation on held-out rows has; `Evaluation` and `LossEvaluation` are two."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from realign.api import DataflowGraph, MicroBatchSpec, Model, ModelInterface, SequenceSample
from realign.data import DataSpec
from realign.settings import Count, Settings


class LoadedRun(Protocol):
    """What an evaluation needs of a loaded run."""

    @property
    def models(self) -> Mapping[str, Model]:
        """The model of each role."""
        ...

    @property
    def interfaces(self) -> Mapping[str, ModelInterface]:
        """The interface of each role."""
        ...

    @property
    def graph(self) -> DataflowGraph:
        """The calls of a step."""
        ...

    @property
    def microbatch(self) -> MicroBatchSpec:
        """The token budget of a pass."""
        ...


@dataclass
class Evaluator(Settings, ABC):
    """Measures a role's model on held-out rows, now and then; no part of the training graph."""

    data: DataSpec
    """Held-out rows: a data node such as `realign.data.PromptData`."""
    every_steps: Count = field(default=10, kw_only=True)
    """Steps between evaluations; there is always one before and one after training."""
    role: str = field(default="actor", kw_only=True)
    """Whose model is measured."""
    batch_prompts: Count = field(default=256, kw_only=True)
    """Prompts taken at once."""

    @property
    def judges(self) -> dict[str, ModelInterface]:
        """Interfaces that belong to the evaluation alone, by key, to be opened and closed with the run."""
        return {}

    @property
    def longest_response(self) -> int:
        """Tokens that a response to a row can have; 0 where none is sampled."""
        return 0

    def check(self, graph: DataflowGraph, models: Iterable[str]) -> None:
        """Check that this can be measured in a run of this graph, whose `models` are the roles with a network.

        Raises:
            ValueError: says what is in the way.
        """
        if self.role not in (roles := list(models)):
            raise ValueError(f"evaluation.role {self.role!r} has no model; roles with one: {', '.join(roles)}")

    def metric_names(self) -> frozenset[str] | None:
        """Names of what `measure` gives, where they are known before it is called; None: they are not."""
        return None

    @abstractmethod
    def measure(self, runtime: LoadedRun, dataset: Any) -> tuple[dict[str, float], SequenceSample]:
        """Take every row of `dataset` once.

        Returns:
            The metrics `eval/...`, and the first batch with what was made of it.
        """

    @abstractmethod
    def describe(self) -> str:
        """A few words for the table that is shown at launch."""

    def batches(self, dataset: Any) -> Iterator[SequenceSample]:
        """The rows of `dataset` in their order, `batch_prompts` at a time.

        Raises:
            ValueError: there are none.
        """
        if not len(dataset):
            raise ValueError("the evaluation data holds no row")
        for start in range(0, len(dataset), self.batch_prompts):
            rows = range(start, min(start + self.batch_prompts, len(dataset)))
            yield dataset.sample([(0, row) for row in rows])

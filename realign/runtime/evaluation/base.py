"""`Evaluator`: base class of evaluations on held-out rows, such as `Evaluation` and `LossEvaluation`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol

from torch import Tensor
from typing_extensions import override

from realign.api import RPC, DataflowGraph, MicroBatchSpec, Model, ModelInterface, SequenceSample
from realign.api.sample import with_own_metadata
from realign.data import DataSpec
from realign.errors import ConfigError, DataError
from realign.runtime.evaluation.scores import Scored, merge_scored
from realign.settings import Count, Settings

EVALUATION = "eval/"
"""Prefix of the metrics of evaluations."""


def in_set(name: str, values: Iterable[str]) -> dict[str, str]:
    """Return, for each metric `eval/...`, its name in the evaluation set `name`: `eval/<name>/...`.

    An empty name is that of the only or unnamed evaluation, whose metrics keep their names.
    """
    prefix = f"{EVALUATION}{name}/" if name else EVALUATION
    return {value: prefix + value.removeprefix(EVALUATION) for value in values}


class LoadedRun(Protocol):
    """Access of an evaluation to a loaded run."""

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
        """RPCs of a step."""
        ...

    @property
    def microbatch(self) -> MicroBatchSpec:
        """Token budget of a forward pass."""
        ...


@dataclass
class Evaluator(Settings, ABC):
    """Base class that measures a role's model on held-out rows at intervals, outside the training graph."""

    reads_prompts: ClassVar[bool] = True
    """Whether the rows are prompts; False: they have the format of the training data."""
    reads_images: ClassVar[bool] = False
    """Whether the rows may have images."""

    data: DataSpec
    """Held-out rows, such as `realign.data.PromptData`."""
    every_steps: Count = field(default=10, kw_only=True)
    """Steps between evaluations; there is always one before and one after training."""
    role: str = field(default="actor", kw_only=True)
    """Role whose model is evaluated."""
    batch_prompts: Count = field(default=256, kw_only=True)
    """Prompts per evaluation batch."""

    @property
    def judges(self) -> dict[str, ModelInterface]:
        """Interfaces that only the evaluation uses, by key; the run opens and closes them."""
        return {}

    @property
    def longest_response(self) -> int:
        """Longest response in tokens that the evaluation can sample; 0 without sampling."""
        return 0

    @property
    def length_setting(self) -> str:
        """Field that determines `longest_response`, for messages."""
        return "generation.max_new_tokens"

    def check(self, graph: DataflowGraph, models: Iterable[str]) -> None:
        """Check that the evaluation works in a run of this graph, whose `models` are the roles with a network.

        Raises:
            ConfigError: the message names the cause.
        """
        if self.role not in (roles := list(models)):
            raise ConfigError(f"role={self.role}: this role has no model. Roles with one: {', '.join(roles)}.")

    def metric_names(self, graph: DataflowGraph) -> frozenset[str] | None:
        """Return the names of the metrics of `measure`; None if they are not known before it is called."""
        return None

    def calls(self, graph: DataflowGraph) -> list[RPC]:
        """Return the RPCs of the training graph that `measure` calls, in execution order."""
        return []

    @abstractmethod
    def measure(self, runtime: LoadedRun, dataset: Any) -> tuple[dict[str, float], SequenceSample]:
        """Evaluate every row of `dataset` once.

        Returns:
            The metrics `eval/...`, and the first batch with the evaluation's outputs.
        """

    @abstractmethod
    def describe(self) -> str:
        """Return a short description for the launch table."""

    def batches(self, dataset: Any) -> Iterator[SequenceSample]:
        """Yield the rows of `dataset` in order, `batch_prompts` at a time.

        Raises:
            DataError: the dataset is empty.
        """
        if not len(dataset):
            raise DataError("evaluation.data: the dataset has no rows. Choose another file, or relax its filters.")
        for start in range(0, len(dataset), self.batch_prompts):
            rows = range(start, min(start + self.batch_prompts, len(dataset)))
            yield with_own_metadata(dataset.sample([(0, row) for row in rows]))


class SamplingEvaluator(Evaluator):
    """Base class of evaluations that sample and score responses."""

    @abstractmethod
    def score(self, runtime: LoadedRun, dataset: Any) -> Iterator[Scored]:
        """Sample and score responses to every row of `dataset` once, and yield them in batches."""

    @override
    def measure(self, runtime: LoadedRun, dataset: Any) -> tuple[dict[str, float], SequenceSample]:
        return merge_scored(self.score(runtime, dataset), partial(self.constant_reward, runtime, dataset))

    def constant_reward(self, runtime: LoadedRun, dataset: Any, response: Tensor) -> float | None:
        """Return the mean reward of `response` (ids) to every row; None if it is unknown or expensive."""
        return None

"""`LossEvaluation`: the loss and the metrics of a training RPC on held-out rows, without an optimizer step.

For models that do not sample: reward model accuracy, likelihood of demonstrations (SFT), DPO accuracy. The RPCs that
the training RPC depends on, such as a reference's log-probs, are called first. Then its `train_step` runs on a
forward-only engine. This works with every interface, and measures the quantity that the interface trains on.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from typing_extensions import override

from realign.api import (
    RPC,
    DataflowGraph,
    Mean,
    MicroBatchSpec,
    SequenceSample,
    Stats,
    Sum,
    merge_stats,
    stat_values,
)
from realign.api.engine import LOSS_SUM, EngineCapabilities, LossFn, LossWeightFn, PipelinableEngine, StepIf
from realign.engines.shared_model import SharedEngine
from realign.errors import ConfigError
from realign.runtime.calls import call, inputs_of
from realign.runtime.evaluation.base import Evaluator, LoadedRun


@dataclass
class LossEvaluation(Evaluator):
    """Measures the loss and training metrics of `role` on held-out rows in the format of its training data."""

    reads_prompts: ClassVar[bool] = False
    reads_images: ClassVar[bool] = True

    @override
    def check(self, graph: DataflowGraph, models: Iterable[str]) -> None:
        """Also check that the graph trains `role` with exactly one RPC."""
        super().check(graph, models)
        self._find_train_call(graph)

    @override
    def calls(self, graph: DataflowGraph) -> list[RPC]:
        training = self._find_train_call(graph)
        return [*self._before(training, graph), training]

    @override
    def measure(self, runtime: LoadedRun, dataset: Any) -> tuple[dict[str, float], SequenceSample]:
        """Return means over the whole of `dataset`, independent of the batch size, and the first batch."""
        training = self._find_train_call(runtime.graph)
        stats: list[Stats] = []
        first: SequenceSample | None = None
        for batch in self.batches(dataset):
            for rpc in self._before(training, runtime.graph):
                interface = runtime.interfaces[rpc.model]
                if rpc.method == "credit":  # a copy, because shaping updates running reward statistics
                    interface = copy.deepcopy(interface)
                batch, _ = call(rpc, runtime.models[rpc.model], interface, batch, runtime.microbatch, runtime.graph)
            first = first or batch
            stats.append(self._loss(training, runtime, batch))
        assert first is not None
        return {f"eval/{name}": value for name, value in stat_values(merge_stats(stats)).items()}, first

    @override
    def describe(self) -> str:
        return f"loss of {self.role}"

    def _find_train_call(self, graph: DataflowGraph) -> RPC:
        calls = [rpc for rpc in graph.rpcs if rpc.model == self.role and rpc.method == "train_step"]
        if len(calls) != 1:
            trained = ", ".join(dict.fromkeys(rpc.model for rpc in graph.rpcs if rpc.method == "train_step"))
            raise ConfigError(
                f"role={self.role}: {len(calls)} RPCs of the graph train this role, but the loss needs "
                f"exactly one. Trained roles: {trained or 'none'}."
            )
        return calls[0]

    def _before(self, training: RPC, graph: DataflowGraph) -> list[RPC]:
        """Return the RPCs that `training` depends on, in execution order."""
        needed = {rpc.name for key in training.inputs for rpc in graph.leading_to(key)}
        return [rpc for rpc in graph.order if rpc.name in needed]

    def _loss(self, training: RPC, runtime: LoadedRun, batch: SequenceSample) -> Stats:
        interface = copy.deepcopy(runtime.interfaces[self.role])  # a copy, because train_step may change its state
        model = runtime.models[self.role]
        forward_only = model.replaced(engine=ForwardOnly(model.name, model.name, model.engine))
        return interface.train_step(forward_only, inputs_of(training, batch), runtime.microbatch)


class ForwardOnly(SharedEngine):
    """An engine whose `train_batch` computes the loss without an optimizer step, and skips prompts already measured.

    An interface that passes over its batch several times, or in mini-batches, therefore measures each prompt once.
    """

    def __init__(self, name: str, of: str, engine: PipelinableEngine) -> None:
        super().__init__(name, of, engine)
        self._measured: set[Hashable] = set()

    @override
    def capabilities(self) -> EngineCapabilities:
        return replace(super().capabilities(), trainable=True)

    @override
    def train_batch(
        self,
        data: SequenceSample,
        mb_spec: MicroBatchSpec,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        step_if: StepIf | None = None,
    ) -> Stats:
        """Return the metrics of `loss_fn` and `loss`; empty for measured prompts and for a batch of weight 0."""
        if self._measured.issuperset(data.ids):
            return {}
        self._measured.update(data.ids)
        weight = loss_weight_fn(data).detach()
        # as in training, where such a batch is skipped: its loss would be 0 / 0
        if not weight > 0:
            return {}
        merged = dict(self.engine.measure(data, mb_spec, loss_fn))
        total = merged.pop(LOSS_SUM)
        assert isinstance(total, Sum)
        # sum and weight, so that merged batches have the loss of one batch with all rows
        return {**merged, "loss": Mean(total.value, weight.to(total.value))}

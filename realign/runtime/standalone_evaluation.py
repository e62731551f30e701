"""`StandaloneEvaluations`: the evaluations of an experiment on saved weights, without its training."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from realign.api import RPC, DataflowGraph, MicroBatchSpec, Model, ModelInterface, SequenceSample
from realign.engines import SharedModel
from realign.engines.shared_model import Share
from realign.errors import ConfigError
from realign.runtime.checks.before_loading import check_held_out, open_interfaces, used_interfaces
from realign.runtime.checks.parts import check_parts
from realign.runtime.datasets import load_held_out
from realign.runtime.evaluation.base import Evaluator, SamplingEvaluator
from realign.runtime.evaluation.scores import Scored, StandardErrors, merge_scored
from realign.runtime.experiment import Experiment
from realign.runtime.models import external_samplers, load_models
from realign.runtime.out_of_memory import SMALLER, memory_limited

Watch = Callable[[SequenceSample, str], None]
"""Receives each scored batch, and the suffix of its metrics in a sweep."""


@dataclass(frozen=True)
class Outcome:
    """Result of one evaluation."""

    metrics: Mapping[str, float]
    """Values of the metrics `eval/...`."""
    standard_errors: Mapping[str, float]
    """Standard errors of the metrics that are means over prompts, see `StandardErrors`."""
    prompts: int
    """Number of evaluated rows."""
    seconds: float
    """Duration in seconds."""


class StandaloneEvaluations:
    """Loaded evaluations of an experiment. Implements `LoadedRun`.

    Loads only the roles that the evaluations call, without optimizers.

    Args:
        experiment: provides evaluations, models, interfaces and the training graph. Its training is not started.
        keys: config keys of the evaluations (`Experiment.all_evaluations`), at least one.

    Raises:
        RealignError: a model or dataset cannot be loaded, or a component is invalid.
    """

    def __init__(self, experiment: Experiment, keys: Sequence[str]) -> None:
        self.interfaces: Mapping[str, ModelInterface] = experiment.interfaces
        self.graph: DataflowGraph = experiment.graph
        self.microbatch: MicroBatchSpec = experiment.microbatch
        self.evaluations = {key: experiment.all_evaluations[key] for key in keys}
        self._needed = _without_training(experiment, self.evaluations)
        self.models: dict[str, Model] = {}
        check_parts(experiment)
        check_held_out(self.evaluations)
        try:
            open_interfaces(self._needed)
            with memory_limited("loading the models", SMALLER):
                self.models = load_models(self._needed)
            self._rows = load_held_out(self._needed, self.models)
        except BaseException:
            self.close()
            raise

    def measure(self, key: str, watch: Watch = lambda batch, ending: None) -> Outcome:
        """Run one evaluation.

        Args:
            key: config key of the evaluation.
            watch: receives the scored batches of an evaluation that samples.

        Raises:
            RealignError: sampling or scoring failed.
        """
        evaluation, rows = self.evaluations[key], self._rows[key]
        errors, started = StandardErrors(), time.perf_counter()

        def watch_part(part: Scored) -> Scored:
            errors.add(part)
            watch(part.batch, part.ending)
            return part

        with memory_limited(key, f"Lower {key}.batch_prompts."):
            if isinstance(evaluation, SamplingEvaluator):
                constant = partial(evaluation.constant_reward, self, rows)
                values, _ = merge_scored(map(watch_part, evaluation.score(self, rows)), constant)
            else:
                values, _ = evaluation.measure(self, rows)
        return Outcome(values, errors.values(), len(rows), time.perf_counter() - started)

    def close(self) -> None:
        """Close the interfaces and external samplers. Idempotent."""
        with ExitStack() as stack:  # closes the rest even if one of them fails to close
            for interface in used_interfaces(self._needed).values():
                stack.callback(interface.close)
            for sampler in external_samplers(self.models):
                stack.callback(sampler.close)


def _without_training(experiment: Experiment, evaluations: Mapping[str, Evaluator]) -> Experiment:
    """Return a copy of the experiment with the roles and RPCs that the evaluations call, and without optimizers."""
    called = {rpc.name: rpc for evaluation in evaluations.values() for rpc in evaluation.calls(experiment.graph)}
    roles = {rpc.model for rpc in called.values()} | {evaluation.role for evaluation in evaluations.values()}
    specs = dict(experiment.models)
    roles |= {spec.of for role in roles if isinstance(spec := specs.get(role), SharedModel)}
    shared = {role: spec for role, spec in specs.items() if role in roles and isinstance(spec, SharedModel)}
    if hidden := [f"models.{role}" for role, spec in shared.items() if spec.branch is Share.reference]:
        raise ConfigError(
            f"{hidden[0]}.branch=reference: a saved model has no initial weights. Set "
            f"{hidden[0]}._target_=realign.engines.TransformersModel and {hidden[0]}.path."
        )
    return dataclasses.replace(
        experiment,
        graph=DataflowGraph(_required_calls(experiment.graph, called), experiment.graph.dataset_keys),
        models={role: spec.for_evaluation() for role, spec in specs.items() if role in roles},
        sync={},
        skip_together=False,
        evaluation=evaluations.get("evaluation"),
        evaluations={key.partition(".")[2]: one for key, one in evaluations.items() if "." in key},
        calibration=None,
    )


def _required_calls(graph: DataflowGraph, called: Mapping[str, RPC]) -> tuple[RPC, ...]:
    """Return the RPCs that do not train, of `called` and of all RPCs that they depend on."""
    names = {rpc.name for caller in called.values() for key in caller.inputs for rpc in graph.leading_to(key)} | set(
        called
    )
    return tuple(
        dataclasses.replace(rpc, after=tuple(name for name in rpc.after if name in names))
        for rpc in graph.order
        if rpc.name in names and rpc.method != "train_step"
    )


__all__ = ["Outcome", "StandaloneEvaluations"]

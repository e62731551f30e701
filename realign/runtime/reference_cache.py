"""References that score the rows of a run once: `cache_reference=true`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from realign.api import RPC, Model, ModelSpec, SequenceSample
from realign.engines.cached_logprobs import CachedEngine
from realign.engines.transformers_model import TransformersModel
from realign.runtime.calls import call
from realign.runtime.datasets import Datasets
from realign.runtime.experiment import Experiment
from realign.runtime.models import check_vocabularies, load_own


def load_with_cache(experiment: Experiment, specs: Mapping[str, ModelSpec], seed: int) -> dict[str, Model]:
    """Load the models of these roles; the networks of cached roles are loaded when a log-prob is missing."""
    cached = experiment.cached_roles
    if not cached:
        return load_own(specs, seed)
    models = load_own({role: spec for role, spec in specs.items() if role not in cached}, seed)
    lead = experiment.lead_role

    def load(role: str) -> Model:
        model = specs[role].load(role, seed=seed)
        check_vocabularies({lead: models[lead], role: model}, lead)
        return model

    for role in cached:
        spec = specs[role]
        assert isinstance(spec, TransformersModel)  # see `Experiment.cached_roles`
        models[role] = Model(role, CachedEngine(role, spec, partial(load, role)), models[lead].tokenizer, seed)
    return {role: models[role] for role in specs}


def score_rows(
    experiment: Experiment, models: Mapping[str, Model], batch: Callable[[int], SequenceSample], datasets: Datasets
) -> list[str]:
    """Let the cached roles score all batches of the run and of its evaluations, and free their networks.

    The batches are those of training, so the first pass over the rows rounds as without the cache.

    Args:
        experiment: the experiment.
        models: models by role.
        batch: returns a batch of training rows by its number, counted from 1.
        datasets: the rows of the evaluations.

    Returns:
        A line for each cached role.
    """
    cached = experiment.cached_roles
    if not cached:
        return []

    def score(rpcs: Iterable[RPC], rows: SequenceSample) -> None:
        for rpc in rpcs:
            if rpc.model in cached:
                interface = experiment.interfaces[rpc.model]
                call(rpc, models[rpc.model], interface, rows, experiment.microbatch, experiment.graph)

    for number in range(1, experiment.steps + 1):
        score(experiment.graph.order, batch(number))
    for where, evaluation in experiment.all_evaluations.items():
        if any(rpc.model in cached for rpc in evaluation.calls(experiment.graph)):
            for rows in evaluation.batches(datasets.held_out[where]):
                score(evaluation.calls(experiment.graph), rows)
    lines = []
    for role in cached:
        engine = models[role].engine
        assert isinstance(engine, CachedEngine)
        engine.release()
        lines.append(f"models.{role} scored {engine.computed} sequences; {engine.cached} were in the cache")
    return lines


__all__ = ["load_with_cache", "score_rows"]

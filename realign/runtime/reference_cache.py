"""References that score the rows of a run once, and keep the log-probs in its folder: `cache_reference=true`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from realign.api import RPC, Model, ModelSpec, SequenceSample
from realign.engines.cached_logprobs import CachedEngine
from realign.errors import ConfigError
from realign.own_files import read_regular, replace_bytes
from realign.ranks import current
from realign.runtime.calls import call
from realign.runtime.datasets import Datasets
from realign.runtime.experiment import Experiment
from realign.runtime.models import check_vocabularies, load_own

REFERENCES = "references.safetensors"
"""File in the folder of a run."""


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
        engine = CachedEngine(role, specs[role], partial(load, role))
        models[role] = Model(role, engine, models[lead].tokenizer, seed)
    return {role: models[role] for role in specs}


def score_rows(
    experiment: Experiment, models: Mapping[str, Model], batch: Callable[[int], SequenceSample], datasets: Datasets
) -> list[str]:
    """Let the cached roles score all batches of the run and of its evaluations, and free their networks.

    The batches are those of training, so the first pass over the rows rounds as without `cache_reference`.

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
    for role, engine in _cached_engines(models).items():
        engine.release()
        lines.append(f"models.{role} scored {engine.computed} sequences; {engine.cached} were scored before")
    return lines


def read_references(models: Mapping[str, Model], run: Path) -> None:
    """Give cached roles the log-probs in the folder of a run; those of other weights or a damaged file are missing."""
    engines = _cached_engines(models)

    def read() -> None:
        from safetensors import SafetensorError
        from safetensors.torch import load

        with suppress(OSError, ConfigError, SafetensorError, KeyError):
            tensors = load(read_regular(run / REFERENCES, (run / REFERENCES).lstat().st_size))
            if torch.equal(tensors.pop("sha256"), _sha256(tensors)):  # safetensors reads flipped bytes without an error
                for role, engine in engines.items():
                    start = f"{role}/{engine.sha256}/"
                    engine.entries |= {k.removeprefix(start): x for k, x in tensors.items() if k.startswith(start)}

    if engines:
        current().lead(read)


def write_references(models: Mapping[str, Model], run: Path) -> None:
    """Write the log-probs of the cached roles into the folder of a run, if there are new ones. Only on rank 0."""
    from safetensors.torch import save

    engines = _cached_engines(models)
    if any(engine.computed for engine in engines.values()):
        tensors = {f"{role}/{e.sha256}/{key}": x for role, e in engines.items() for key, x in e.entries.items()}
        replace_bytes(run / REFERENCES, save(tensors | {"sha256": _sha256(tensors)}))


def _cached_engines(models: Mapping[str, Model]) -> dict[str, CachedEngine]:
    return {role: m.engine for role, m in models.items() if m.has_engine and isinstance(m.engine, CachedEngine)}


def _sha256(tensors: Mapping[str, Tensor]) -> Tensor:
    digest = hashlib.sha256()
    for key, tensor in sorted(tensors.items()):
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)} ".encode() + tensor.numpy().tobytes())
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)

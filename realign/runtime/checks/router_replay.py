"""Check that roles with router replay (`GenerationConfig.router_replay`) can record and replay choices of experts."""

from __future__ import annotations

from collections.abc import Mapping

from realign.api import DataflowGraph, Model
from realign.api.interface import implements
from realign.api.router_experts import ROUTER_EXPERTS
from realign.api.sampler_spec import ConfiguresSampler
from realign.errors import ConfigError
from realign.runtime.experiment import Experiment
from realign.runtime.rollout.background import owner_of


def check_replay(experiment: Experiment) -> None:
    """Check interfaces and samplers, before models are loaded.

    Raises:
        ConfigError: an interface does not record the choices, or an external sampler does not return them.
    """
    for role in dict.fromkeys(rpc.model for rpc in experiment.graph.rpcs):
        interface = experiment.interfaces[role]
        generation = interface.plan().generation
        if generation is None or not generation.router_replay:
            continue
        key = f"interfaces.{role}.generation.router_replay"
        writes = interface.keys("generate").writes if implements(type(interface), "generate") else None
        if ROUTER_EXPERTS not in (writes or ()):
            kind = type(interface).__name__
            raise ConfigError(f"{key}=true: {kind} does not record choices of experts. Set {key}=false.")
        owner = owner_of(experiment, role)
        spec = experiment.models.get(owner)
        if isinstance(spec, ConfiguresSampler) and not spec.sampler.capabilities().router_experts:
            raise ConfigError(
                f"{key}=true: models.{owner}.sampler={type(spec.sampler).__name__} does not return the choices of "
                f"experts. Remove models.{owner}.sampler, or set {key}=false."
            )


def check_models_replay(graph: DataflowGraph, models: Mapping[str, Model]) -> None:
    """Check that the loaded models can record or replay the choices that the graph passes on.

    Raises:
        ConfigError: a model is dense, or its family is not supported.
    """
    for rpc in graph.rpcs:
        own = {theirs: ours for ours, theirs in rpc.rename.items()}
        if rpc.model not in models or ROUTER_EXPERTS not in {own.get(key, key) for key in (*rpc.inputs, *rpc.outputs)}:
            continue
        try:
            models[rpc.model].machine.check_router_replay()
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"{error} Set generation.router_replay=false.") from error


__all__ = ["check_models_replay", "check_replay"]

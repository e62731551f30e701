"""Work of an experiment: sizes of its models, calls of its graph, and lengths of its sequences. Loads no weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, TypeAlias

import torch

from realign.engines import Sharding, TransformersModel
from realign.errors import ConfigError
from realign.models import All, DType, Lora, TopLayers
from realign.runtime import Experiment
from realign.samplers import InProcessSampling
from realign.settings import Auto
from realign_planner.internals import (
    MemoryModel,
    check_path,
    find_adapter,
    is_encoder_decoder,
    quiet_transformers,
    rank_work,
    readable,
)
from realign_planner.options import DeviceKind, PlanOptions
from realign_planner.simulator import NetworkSizes, Tail, Work

FORWARD = 2.0
"""Floating-point operations per weight and token of a forward pass."""
BACKWARD = 4.0
"""Floating-point operations per weight and token of a backward pass; half of them are for gradients of weights."""
MeshSizes: TypeAlias = tuple[tuple[str, int], ...]
"""Dimensions of a mesh, by name."""
LORA_FRACTION = 0.01
"""Assumed fraction of trained weights with LoRA."""


@dataclass(frozen=True)
class AutoMemory:
    """Settings of a role that follow from the memory of the device."""

    keeps: bool = False
    """Whether `sharding.keep_rollout` is auto."""
    checkpoints: bool = False
    """Whether `gradient_checkpointing` is auto."""


@dataclass(frozen=True)
class RoleLoad:
    """A model of the experiment. Roles that share the model of another role have none."""

    name: str
    network: NetworkSizes
    model: MemoryModel
    """Its memory and traffic."""
    trained: float = 0.0
    """Fraction of the weights that train; 0 for a frozen model."""
    auto: AutoMemory = AutoMemory()
    sharding: Sharding = field(default_factory=Sharding)
    """The mesh in the config."""
    configured: bool = True
    """Whether the config has a node for it. Roles added by default copy the settings of another role."""


@dataclass(frozen=True)
class CallLoad:
    """A call of the graph that runs a model on the whole batch."""

    name: str
    role: str
    """Role whose weights it uses."""
    operations: float
    """Floating-point operations per weight and token."""
    optimizer_steps: int = 0
    after: tuple[str, ...] = ()
    """Calls that it waits for."""
    epochs: int = 1
    """Passes over the batch."""

    @property
    def minibatches(self) -> int:
        """Return the number of parts of the batch with an optimizer step each; 1 without optimizer steps."""
        return max(1, self.optimizer_steps // self.epochs)


@dataclass(frozen=True)
class Workload:
    """Work of an experiment. One step trains on one batch."""

    work: Work
    roles: Mapping[str, RoleLoad]
    calls: tuple[CallLoad, ...]
    """Calls after sampling, in the order of the graph."""
    sampled: str
    """Role that samples."""
    sampling_calls: tuple[str, ...]
    """Calls of the graph that sample."""
    reward_calls: tuple[str, ...]
    """Calls of the graph without a model."""
    longest_prompt: float
    budget: int
    """Maximum number of tokens of a forward pass."""
    max_slots: int | None = None
    """Setting `max_slots` of the in-process sampler."""
    cache_fraction: float = InProcessSampling.cache_fraction
    """Setting `cache_fraction` of the in-process sampler."""
    corrects_staleness: bool = True
    correction_key: str | None = None
    """Config key that enables the correction of stale samples; None if the interface has no such field."""
    servers: bool = True
    """Whether servers return what the algorithm records. They don't return choices of experts."""
    accepts: Callable[[str, int, MeshSizes], bool] = lambda role, ranks, mesh: True
    """Whether the launch accepts a number of ranks of a role, with these sizes of its mesh by name."""

    @property
    def epochs(self) -> int:
        """Return the largest number of epochs of a training call."""
        return max(call.epochs for call in self.calls)

    @property
    def sequences(self) -> int:
        """Return the sequences of a step."""
        return self.work.batch_prompts * self.work.group

    @property
    def longest_response(self) -> int:
        """Return the tokens of the longest response."""
        return math.ceil(self.work.lengths.most)

    def tokens_per_pass(self, parts: int) -> float:
        """Return the tokens of a micro-batch of one of several parts of the batch."""
        return min(self.budget, self.tokens / parts)

    @property
    def tokens(self) -> float:
        """Return the expected packed tokens of a step."""
        return self.sequences * (self.work.prompt_tokens + min(self.work.lengths.mean, self.work.lengths.most))


def workload_of(experiment: Experiment, options: PlanOptions) -> Workload:
    """Return the work of an experiment, with lengths from the options.

    Raises:
        ConfigError: the graph does not sample or train, or a model is not a `TransformersModel`.
        DataError: the `config.json` of a model cannot be read.
    """
    graph = experiment.graph
    sampling = [rpc for rpc in graph.order if rpc.method == "generate"]
    if not sampling or not any(rpc.method == "train_step" for rpc in graph.order):
        raise ConfigError("realign plan: the graph does not sample and train. Plan an experiment with rollouts.")
    lead = sampling[0].model
    plan, interface = experiment.interfaces[lead].plan(), experiment.interfaces[lead]
    owners = dict.fromkeys(experiment.owner_of(role) for role in experiment.roles if role in experiment.models)
    roles = {role: _role(experiment, role, options.device) for role in owners}
    own_calls = {rpc.name for rpc in graph.order if experiment.interfaces[rpc.model].needs_engine}
    sampled = experiment.owner_of(lead)
    spec = experiment.models[sampled]
    assert isinstance(spec, TransformersModel)  # `_role` has checked it
    corrects = any(experiment.interfaces[rpc.model].plan().corrects_staleness for rpc in graph.order)
    own = spec.sampler if isinstance(spec.sampler, InProcessSampling) else InProcessSampling()
    correctable = any(setting.name == "correction" for setting in fields(interface))  # type: ignore[arg-type]
    return Workload(
        # Each further sampling call, such as the greedy baseline of ReMax, adds one response per prompt.
        work=_work(experiment, options, (plan.responses_per_prompt or 1) + len(sampling) - 1, lead),
        roles=roles,
        calls=tuple(_calls(experiment, roles, own_calls)),
        sampled=sampled,
        sampling_calls=tuple(rpc.name for rpc in sampling),
        reward_calls=tuple(rpc.name for rpc in graph.order if rpc.name not in own_calls),
        # Assumed: the options have the mean only.
        longest_prompt=2 * options.prompt_tokens,
        budget=experiment.microbatch.max_tokens_per_microbatch or 2**62,
        max_slots=own.max_slots,
        cache_fraction=own.cache_fraction,
        corrects_staleness=corrects,
        correction_key=f"interfaces.{lead}.correction" if correctable else None,
        servers=plan.generation is None or not plan.generation.router_replay,
        accepts=_accepts(experiment, roles),
    )


def _accepts(experiment: Experiment, roles: Mapping[str, RoleLoad]) -> Callable[[str, int, MeshSizes], bool]:
    @cache
    def checks(role: str) -> Callable[[Sharding, int], None]:
        spec = experiment.models[role]
        assert isinstance(spec, TransformersModel)  # `_role` has checked it
        return spec.mesh_checks(role, **rank_work(experiment, role))

    @cache
    def accepts(role: str, ranks: int, mesh: MeshSizes) -> bool:
        load = roles[role]
        if ranks > 1 and load.model.shape.unpacked:
            return False
        sizes: dict[str, Any] = dict(mesh)
        try:
            checks(role)(replace(load.sharding, **sizes), ranks)
        except ConfigError:
            return False
        return True

    return accepts


def _work(experiment: Experiment, options: PlanOptions, group: int, lead: str) -> Work:
    longest = experiment.longest_response or 1
    generation = experiment.interfaces[lead].plan().generation
    fixed = generation is not None and generation.fixed_length
    mean, sigma = (float(longest), 0.0) if fixed else (options.mean_response(longest), options.length_sigma)
    return Work(
        batch_prompts=experiment.batch_prompts,
        group=group,
        steps=0,
        prompt_tokens=options.prompt_tokens,
        lengths=Tail(mean, sigma, longest),
        reward_s=Tail(options.reward_s),
        reward_workers=options.reward_workers,
    )


def _calls(experiment: Experiment, roles: Mapping[str, RoleLoad], own_calls: set[str]) -> list[CallLoad]:
    graph, loads = experiment.graph, []
    for rpc in graph.order:
        if rpc.name not in own_calls or rpc.method in ("generate", "credit"):
            continue
        role, plan = experiment.owner_of(rpc.model), experiment.interfaces[rpc.model].plan()
        operations, steps, epochs = FORWARD, 0, 1
        if rpc.method == "train_step":
            # Gradients of activations go through all layers; those of weights are needed for trained ones only.
            partly = BACKWARD / 2 * (1 + roles[role].trained)
            operations, steps, epochs = plan.epochs * (FORWARD + partly), plan.optimizer_steps, plan.epochs
        loads.append(CallLoad(rpc.name, role, operations, steps, tuple(graph.edges[rpc.name]), epochs))
    return loads


def _role(experiment: Experiment, role: str, device: DeviceKind) -> RoleLoad:
    spec = experiment.models[role]
    if not isinstance(spec, TransformersModel):
        raise ConfigError(
            f"models.{role}: realign plan knows the sizes of TransformersModel only, not of {type(spec).__name__}."
        )
    model = _memory_model(role, spec, device)
    shape, trained = model.shape, 0.0
    if spec.optimizer is not None:
        trains = spec.trains
        trained = 1.0 if isinstance(trains, All) else LORA_FRACTION
        if isinstance(trains, TopLayers):
            trained = min(1.0, trains.layers / shape.layers)
        elif not isinstance(trains, All | Lora):
            trained = 1.0
    network = NetworkSizes(
        weights=float(shape.parameters),
        idle_experts=shape.in_experts * (1 - shape.experts_per_token / shape.experts) if shape.experts else 0.0,
        layers=shape.layers,
        kv_heads=shape.keys * shape.heads // shape.queries,
        head_size=shape.queries // shape.heads,
        hidden=shape.hidden,
        number_bytes=model.dtype.itemsize,
    )
    auto = AutoMemory(spec.sharding.keep_rollout is Auto.auto, spec.gradient_checkpointing is Auto.auto)
    return RoleLoad(role, network, model, trained, auto, spec.sharding, configured=role not in experiment.filled_roles)


def _memory_model(role: str, spec: TransformersModel, device: DeviceKind) -> MemoryModel:
    """Return the formula of the memory of a role on a device of the plan, which this machine may lack."""
    from transformers import AutoConfig

    key = f"models.{role}.path"
    adapter = find_adapter(f"{key}={spec.path!r}", spec.path)
    path = check_path(key, spec.path if adapter is None else adapter.base)
    with readable(f"{key}={path!r}"), quiet_transformers():
        config = AutoConfig.from_pretrained(path, trust_remote_code=spec.trust_remote_code)
    if is_encoder_decoder(config):
        raise ConfigError(f"{key}: plans do not support encoder-decoder models. Use a decoder model.")
    cpu = torch.device("cpu")
    model = replace(spec.memory_model(role, cpu, 1), lanes=1)
    if device is DeviceKind.cpu:
        return model
    half = spec.dtype is not DType.float32
    return replace(model, device=torch.device("cuda"), dtype=torch.bfloat16 if half else torch.float32)


__all__ = ["AutoMemory", "CallLoad", "RoleLoad", "Workload", "workload_of"]

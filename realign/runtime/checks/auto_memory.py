"""Decide `auto` settings that trade time for memory, from the memory estimate and the free memory of the device."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from realign.api.model import ModelSpec
from realign.engines.distributed.ranks import current
from realign.engines.transformers_model import TransformersModel
from realign.runtime.checks.device_estimate import CPU, DeviceEstimate, Free, device_of, estimate, show
from realign.runtime.experiment import Experiment
from realign.settings import Auto

USABLE = 0.9
"""Fraction of the free memory that an estimate may use. Estimates are within 15%, and allocators lose some."""
CHECKPOINTING = "gradient checkpointing"
KEEPING = "copy for sampling kept"


@dataclass(frozen=True)
class Decision:
    """The value of an `auto` setting of a role."""

    role: str
    setting: str
    on: bool
    reason: str

    def __str__(self) -> str:
        return f"{'on' if self.on else 'off'} (auto: {self.reason})"


def decide(experiment: Experiment, free: Free | None = None) -> list[Decision]:
    """Return what `auto` means for each trained role on CUDA. A CPU decides nothing, and never recomputes.

    A copy of the weights for sampling goes first if training and scoring do not fit beside it, since it is gathered
    again after each step anyway. A role whose training still does not fit then recomputes its layers.

    Args:
        experiment: the experiment.
        free: returns the free memory of a device before models are loaded; None asks the device.

    Raises:
        RealignError: the config of a model cannot be read.
    """
    undecided = {
        role: spec
        for role in experiment.roles
        if isinstance(spec := experiment.models.get(role), TransformersModel)
        and spec.optimizer is not None
        and Auto.auto in (spec.gradient_checkpointing, spec.sharding.keep_rollout)
        and device_of(spec).type != CPU
    }
    if not undecided:
        return []
    return [choice for device in estimate(experiment, free=free) for choice in _on_device(device, undecided)]


def _on_device(device: DeviceEstimate, undecided: Mapping[str, TransformersModel]) -> Iterator[Decision]:
    if device.free is None:
        return
    room, size = USABLE * device.free, f"{show(device.free)} free on the device"
    own = {role: memory for role, memory in device.roles.items() if role in undecided}
    copies = {
        role: device.processes * memory.sampling_copy
        for role, memory in own.items()
        if memory.sampling_copy and undecided[role].sharding.keep_rollout is Auto.auto
    }
    largest = max((device.during(role, memory.computing) for role, memory in device.roles.items()), default=0)
    keeps = largest <= room
    freed = 0 if keeps else sum(copies.values())
    for role in copies:
        yield Decision(role, KEEPING, keeps, f"{show(largest)} with it, {size}")
    for role, memory in own.items():
        if memory.training and undecided[role].gradient_checkpointing is Auto.auto:
            needed = device.during(role, memory.training) - freed
            yield Decision(role, CHECKPOINTING, needed > room, f"{show(needed)} without it, {size}")


def decided(experiment: Experiment, free: Free | None = None) -> Experiment:
    """Return the experiment with what `decide` chose. All ranks follow rank 0."""
    choices = current().lead(lambda: decide(experiment, free))
    if not choices:
        return experiment
    models: dict[str, ModelSpec] = dict(experiment.models)
    for choice in choices:
        spec = copy.copy(models[choice.role])  # `replace` would lose an inherited tokenizer
        assert isinstance(spec, TransformersModel)
        if choice.setting == CHECKPOINTING:
            spec.gradient_checkpointing = choice.on
        else:
            spec.sharding = replace(spec.sharding, keep_rollout=choice.on)
        models[choice.role] = spec
    settled = copy.copy(experiment)
    settled.models = models
    return settled

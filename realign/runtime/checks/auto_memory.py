"""Decide `auto` settings that trade time for memory, from the memory estimate and the free memory of the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from realign.api.memory import MemoryChoice
from realign.api.model import ModelSpec
from realign.ranks import current
from realign.runtime.checks.device_estimate import CPU, DeviceEstimate, Free, device_of, estimate, show
from realign.runtime.experiment import Experiment

USABLE = 0.9
"""Fraction of the free memory that an estimate may use. Estimates are within 15%, and allocators lose some."""


@dataclass(frozen=True)
class Decision:
    """The value of an `auto` setting of a role."""

    role: str
    setting: MemoryChoice
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
        role: choices
        for role in experiment.roles
        if (spec := experiment.models.get(role)) is not None
        and (choices := spec.memory_choices())
        and device_of(spec).type != CPU
    }
    if not undecided:
        return []
    return [choice for device in estimate(experiment, free=free) for choice in _on_device(device, undecided)]


def _on_device(device: DeviceEstimate, undecided: Mapping[str, frozenset[MemoryChoice]]) -> Iterator[Decision]:
    if device.free is None:
        return
    room, size = USABLE * device.free, f"{show(device.free)} free on the device"
    own = {role: memory for role, memory in device.roles.items() if role in undecided}
    copies = {
        role: device.processes * memory.sampling_copy
        for role, memory in own.items()
        if memory.sampling_copy and MemoryChoice.sampling_copy in undecided[role]
    }
    largest = max((device.during(role, memory.computing) for role, memory in device.roles.items()), default=0)
    keeps = largest <= room
    freed = 0 if keeps else sum(copies.values())
    for role in copies:
        yield Decision(role, MemoryChoice.sampling_copy, keeps, f"{show(largest)} with it, {size}")
    for role, memory in own.items():
        if memory.training and MemoryChoice.checkpointing in undecided[role]:
            needed = device.during(role, memory.training) - freed
            yield Decision(role, MemoryChoice.checkpointing, needed > room, f"{show(needed)} without it, {size}")


def with_memory_choices(experiment: Experiment, free: Free | None = None) -> Experiment:
    """Return the experiment with what `decide` chose. All ranks follow rank 0."""
    choices = current().lead(lambda: decide(experiment, free))
    if not choices:
        return experiment
    models: dict[str, ModelSpec] = dict(experiment.models)
    for choice in choices:
        models[choice.role] = models[choice.role].with_memory_choice(choice.setting, choice.on)
    return dataclasses.replace(experiment, models=models)

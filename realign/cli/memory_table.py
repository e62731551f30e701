"""Memory estimate of `realign check` as a table."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from realign.api.memory import RoleMemory
from realign.runtime.checks.device_estimate import DeviceEstimate, show

KINDS = ("weights", "optimizer", "gradients", "activations", "head", "KV cache", "rollout", "peak of a call")


def print_memory(console: Console, devices: Sequence[DeviceEstimate], prompt: int) -> None:
    """Print the estimate of each role and device, and warn about devices that are too small for the weights.

    Args:
        console: where to print.
        devices: the estimates.
        prompt: length of the longest prompt that the estimate assumes, in tokens.
    """
    if not devices:
        return
    table = Table(
        title=f"Memory (estimate, prompts of up to {prompt:,} tokens)", title_justify="left", box=None, pad_edge=False
    )
    rows = [(role, cells(memory)) for device in devices for role, memory in device.roles.items()]
    for role in ("", *(role for role, _ in rows)):
        table.add_column(role, justify="right" if role else "left", overflow="fold")
    for i, kind in enumerate(KINDS):
        table.add_row(kind, *(values[i] for _, values in rows))
    console.print()
    console.print(table)
    for device in devices:
        console.print(summary(device), markup=False, highlight=False, soft_wrap=True)
    warn_memory(device for device in devices if not device.holds_weights)


def warn_memory(devices: Iterable[DeviceEstimate]) -> None:
    """Warn about devices that are too small."""
    for device in devices:
        for problem in device.problems():
            warnings.warn(problem, stacklevel=2)


def cells(role: RoleMemory) -> list[str]:
    """Return the sizes of a role, in the order of `KINDS`; empty where a role needs nothing."""
    sizes = (
        role.weights + role.references,
        role.moments + role.average,
        role.gradients,
        role.activations or role.scoring,
        role.head,
        role.cache,
        role.rollout_weights + role.rollout_work,
        role.passing,
    )
    return [show(size) if size else "" for size in sizes]


def summary(device: DeviceEstimate) -> str:
    """Return the line of a device: memory between calls, peak and free memory."""
    processes = f" in {device.processes} processes" if device.processes > 1 else ""
    free = "" if device.free is None else f", {show(device.free)} free"
    return f"{device.device}{processes}: {show(device.kept)} between calls, peak {show(device.peak)}{free}"

"""Where the models of a run live and who calls them (config node `runtime`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from realign.settings import NonNegativeInt, Positive, Settings

if TYPE_CHECKING:
    from realign.runtime.experiment import Experiment
    from realign.runtime.local import LocalRuntime


class Backend(StrEnum):
    """What calls the models."""

    local = "local"
    """This process; under torchrun, each of its processes, with sharded engines."""
    ray = "ray"
    """Worker processes of a Ray cluster (extra `ray`)."""


@dataclass
class RuntimeSpec(Settings):
    """Where the models of a run live."""

    kind: Backend = Backend.local
    """local | ray."""
    address: str | None = None
    """Of a Ray cluster that is there already; null starts one on this machine."""
    placement: str | Mapping[str, Any] = field(default_factory=dict)
    """With kind=ray: where roles live. For each role `{devices: 2}`, or `{with: actor}` for the processes of another
    one, and `offload: true` where it shall wait on the host between its calls; or colocated (all in one process), or
    separate (each in its own). A role that is not named has its own process if it is trained, and else lives with the
    first one that has. `rollout` are the workers of rollout=async."""
    placement_timeout_s: Positive = 60.0
    """Seconds to wait until the cluster has room for all workers."""
    rpc_timeout_minutes: Positive = 30.0
    """Minutes after which a call of the graph is taken to hang, on any rank; the run ends and says which. Starting,
    loading, evaluating and saving may take longer."""
    max_recoveries: NonNegativeInt = 3
    """With kind=ray: how often a run goes on from its last checkpoint after a worker died."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.placement, str | Mapping):
            raise ValueError(f"placement must be colocated, separate or a mapping of roles, found {self.placement!r}")
        if self.kind is Backend.local and (self.placement or self.address):
            name = "placement" if self.placement else "address"
            raise ValueError(f"{name} has no effect with kind=local; choose runtime=ray, or leave it out")


class WorkerLost(RuntimeError):
    """A worker process has died: killed, out of memory, or with its machine. The run goes on from a checkpoint."""


class WorkerHangs(RuntimeError):
    """A worker process did not answer a call of the graph in time."""


def check_runtime(experiment: Experiment) -> None:
    """Find what is wrong with the runtime of an experiment before anything is started.

    Raises:
        ValueError: Ray is not installed; or names the key, of a placement or a device.
    """
    from realign.runtime.placement import plan_groups

    if experiment.runtime.kind is Backend.ray:
        if find_spec("ray") is None:
            raise ValueError("runtime=ray needs the package ray: install realign[ray], or use runtime=local")
        plan_groups(experiment)
        for role in experiment.roles:
            spec = experiment.models.get(role)
            device = None if spec is None else spec.facts().device
            if device is not None and device.startswith("cuda:"):
                raise ValueError(
                    f"models.{role}.device={device!r}: with runtime=ray every process has a GPU of its own, which it "
                    "knows as cuda; set cuda or auto"
                )


@contextmanager
def cluster_for(experiment: Experiment) -> Iterator[None]:
    """Inside this context there is what `open_runtime` needs: with kind=ray a cluster, else nothing.

    Raises:
        ValueError: no cluster answers at `runtime.address`.
    """
    if experiment.runtime.kind is Backend.local:
        yield
        return
    from realign.runtime.placement import plan_groups
    from realign.runtime.ray import connected

    processes = sum(group.devices for group in plan_groups(experiment))
    with connected(experiment.runtime.address, processes):
        yield


def open_runtime(experiment: Experiment) -> LocalRuntime:
    """The loaded experiment, ready for its first step."""
    if experiment.runtime.kind is Backend.ray:
        from realign.runtime.ray import RayRuntime

        return RayRuntime(experiment)
    from realign.runtime.local import LocalRuntime

    return LocalRuntime(experiment)

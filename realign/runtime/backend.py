"""Where the models of a run live and who calls them (config node `runtime`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
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


class Placement(StrEnum):
    """A placement of all roles in one word."""

    colocated = "colocated"
    """All roles share one worker process."""
    separate = "separate"
    """Each role has its own worker process."""


@dataclass
class RuntimeSpec(Settings, ABC):
    """Where the models of a run live; `Local` and `Ray` are the choices."""

    rpc_timeout_minutes: Positive = 30.0
    """Minutes after which a call of the graph counts as hanging, on any rank. The run then ends and names the call.
    Starting, loading, evaluating and saving may take longer."""

    @property
    @abstractmethod
    def starts_workers(self) -> bool:
        """Whether models live in worker processes that the run starts, and may lose."""


@dataclass
class Local(RuntimeSpec):
    """Models live in this process; under torchrun, in each of its processes, with sharded engines."""

    @property
    def starts_workers(self) -> bool:
        """See `RuntimeSpec.starts_workers`."""
        return False


@dataclass
class Ray(RuntimeSpec):
    """Models live in worker processes of a Ray cluster (extra `ray`)."""

    address: str | None = None
    """Address of a running Ray cluster, or auto; null starts one on this machine."""
    placement: Placement | Mapping[str, Any] = field(default_factory=dict)
    """Worker processes of the roles: colocated (all in one), separate (one each), or a mapping of roles. For each role
    the mapping contains `{devices: 2}`, or `{with: actor}` to share the processes of another role, and `offload: true`
    to keep its weights on the host between its calls. A role that is not in the mapping has its own process if it is
    trained; otherwise it shares that of the first role that has one. `rollout` are the workers of rollout=async."""
    placement_timeout_s: Positive = 60.0
    """Seconds to wait until the cluster has resources for all workers."""
    max_recoveries: NonNegativeInt = 3
    """How often a run continues from its last checkpoint after a worker died."""

    @property
    def starts_workers(self) -> bool:
        """See `RuntimeSpec.starts_workers`."""
        return True


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

    if experiment.runtime.starts_workers:
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
    """Inside this context there is what `open_runtime` needs: with runtime=ray a cluster, else nothing.

    Raises:
        ValueError: no cluster answers at `runtime.address`.
    """
    if not isinstance(experiment.runtime, Ray):
        yield
        return
    from realign.runtime.placement import plan_groups
    from realign.runtime.ray import connected

    processes = sum(group.devices for group in plan_groups(experiment))
    with connected(experiment.runtime.address, processes):
        yield


def open_runtime(experiment: Experiment) -> LocalRuntime:
    """The loaded experiment, ready for its first step."""
    if isinstance(experiment.runtime, Ray):
        from realign.runtime.ray import RayRuntime

        return RayRuntime(experiment, experiment.runtime)
    from realign.runtime.local import LocalRuntime

    return LocalRuntime(experiment)

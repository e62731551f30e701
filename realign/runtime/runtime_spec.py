"""Where the models of a run live and who calls them (config node `runtime`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from realign.settings import NonNegativeInt, Positive, Settings


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

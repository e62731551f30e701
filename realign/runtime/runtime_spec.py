"""Where the models of a run are placed and which process calls them (config node `runtime`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from typing_extensions import override

from realign.settings import NonNegativeInt, Positive, Settings

_DEFAULT_MINUTES = 30.0
"""Minutes of a call of the graph, for `rpc_timeout_minutes=null`."""


class Placement(StrEnum):
    """Placement of all roles by one word."""

    colocated = "colocated"
    """All roles share one worker process."""
    separate = "separate"
    """Each role has its own worker process."""


@dataclass
class RuntimeSpec(Settings, ABC):
    """Base class of runtime settings; `Local` and `Ray` are the choices."""

    rpc_timeout_minutes: Positive | None = None
    """Time limit in minutes of a call of the graph. A run that exceeds it ends with exit code 75, and names the call.
    Starting, loading, evaluating and saving may take longer. null: 30 under torchrun and for workers of Ray; a single
    process, or the driver of Ray, then only logs a warning after 30 minutes and continues."""

    @property
    def call_minutes(self) -> float:
        """Minutes after which a call of the graph counts as hanging."""
        return _DEFAULT_MINUTES if self.rpc_timeout_minutes is None else self.rpc_timeout_minutes

    @property
    @abstractmethod
    def starts_workers(self) -> bool:
        """Whether the run starts worker processes for its models, which may die during the run."""


@dataclass
class Local(RuntimeSpec):
    """Models run in this process; under torchrun, in all of its processes, with sharded engines."""

    @property
    @override
    def starts_workers(self) -> bool:
        return False


@dataclass
class Ray(RuntimeSpec):
    """Models run in worker processes of a Ray cluster (extra `ray`)."""

    address: str | None = None
    """Address of a running Ray cluster, or auto; null starts one on this machine."""
    placement: Placement | Mapping[str, Any] = field(default_factory=dict)
    """Worker processes of the roles: colocated (all in one), separate (one each), or a mapping of roles. For each
    role the mapping contains `{devices: 2}`, or `{with: actor}` to share the processes of another role, and `offload:
    true` to keep its weights on the host between its calls. A trained role that is not in the mapping has its own
    process. Other unlisted roles share the process of the first role that has one. `rollout` places the workers of
    rollout=async."""
    placement_timeout_s: Positive = 60.0
    """Wait at most this many seconds for the cluster's resources."""
    max_recoveries: NonNegativeInt = 3
    """Continue from the last checkpoint at most this many times after a worker died."""

    @property
    @override
    def starts_workers(self) -> bool:
        return True

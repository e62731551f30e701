"""When the responses of a step are sampled: synchronously or asynchronously (config node `rollout`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum

from typing_extensions import override

from realign.settings import NonNegativeInt, Settings


class OnUpdate(StrEnum):
    """What happens to the KV cache of responses that are being sampled when the weights change."""

    recompute = "recompute"
    """Recompute the KV cache with the new weights."""
    keep = "keep"
    """Keep the KV cache that was computed with the old weights."""


class RolloutSpec(Settings, ABC):
    """Base class of rollout settings; `Sync` and `Async` are the choices."""

    @property
    @abstractmethod
    def ahead(self) -> bool:
        """Whether responses are sampled asynchronously, before the step that trains on them."""

    @abstractmethod
    def describe(self) -> str:
        """Return a line for the launch table."""


@dataclass
class Sync(RolloutSpec):
    """Synchronous rollout: the current policy samples responses within the step that trains on them."""

    @property
    @override
    def ahead(self) -> bool:
        return False

    @override
    def describe(self) -> str:
        return "in the step that trains on them"


@dataclass
class Async(RolloutSpec):
    """Asynchronous rollout: a possibly stale copy of the policy samples responses during training."""

    max_staleness: NonNegativeInt = 1
    """How stale a response may be: training steps between its start and the step that trains on it. 0 gives the same
    results as `Sync`. See `realign.runtime.rollout.staleness`."""
    on_update: OnUpdate = OnUpdate.recompute
    """What to do with the KV cache of unfinished responses when the weights change: recompute | keep."""

    @property
    @override
    def ahead(self) -> bool:
        return True

    @property
    def recompute(self) -> bool:
        """Whether the KV cache of unfinished responses is recomputed when the weights change."""
        return self.on_update is OnUpdate.recompute

    @override
    def describe(self) -> str:
        if not self.max_staleness:
            return "by a copy of the policy, in the step that trains on them"
        then = "recomputed" if self.recompute else "kept"
        return (
            f"ahead of training, started at most {self.max_staleness} versions before the step; KV cache {then} when "
            "the weights change"
        )

"""`RemoteCopy`: a copy of the policy in rollout workers, which sample ahead of training (rollout=async)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from realign.api import GenerationConfig, SequenceSample
from realign.runtime.ray.groups import WorkerGroup


class RemoteCopy:
    """Implements `realign.runtime.ahead.PolicyCopy`. A call goes to the worker that has the fewest."""

    def __init__(self, role: str, group: WorkerGroup) -> None:
        """Of the policy `role`, of which each process of `group` has loaded a copy."""
        self._role = role
        self._group = group
        self._lock = threading.Lock()
        self._calls = [0] * len(group)

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """See `PolicyCopy.generate`."""
        with self._worker() as worker:
            found: SequenceSample = self._group.ask(self._role, "sample", [(data, config, seed)], only=worker)[0]
        return found

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """See `PolicyCopy.update`: all workers have the weights when it returns."""
        self._group.ask(self._role, "update", [(weights, version)])

    def close(self) -> None:
        """End the workers."""
        self._group.kill()

    @contextmanager
    def _worker(self) -> Iterator[int]:
        with self._lock:
            worker = min(range(len(self._calls)), key=self._calls.__getitem__)
            self._calls[worker] += 1
        try:
            yield worker
        finally:
            with self._lock:
                self._calls[worker] -= 1

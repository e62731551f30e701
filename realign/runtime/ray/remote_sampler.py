"""`RemoteSampler`: copies of the policy in rollout workers, for asynchronous rollout (rollout=async)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from realign.api import GenerationConfig, SequenceSample
from realign.api.in_process_sampler import IN_PROCESS
from realign.api.sampler import Capabilities, Completion, FutureHandle, Request, WeightSource
from realign.runtime.ray.worker_groups import WorkerGroup


class RemoteSampler:
    """Implements `realign.api.Sampler`. Each call goes to the worker with the fewest active calls."""

    def __init__(self, role: str, group: WorkerGroup) -> None:
        """Create a sampler of the policy `role`. Each process of `group` has loaded a copy of the policy."""
        self._role = role
        self._group = group
        self._version = 0
        self._lock = threading.Lock()
        self._calls = [0] * len(group)
        self._waiting: set[FutureHandle] = set()
        self._closed = False

    @property
    def version(self) -> int:
        """See `Sampler.version`."""
        return self._version

    def capabilities(self) -> Capabilities:
        """See `Sampler.capabilities`; workers do not report tokens of unfinished responses."""
        return IN_PROCESS

    def submit(self, request: Request) -> FutureHandle:
        """See `Sampler.submit`; starts one thread per response."""
        handle = FutureHandle(request)
        with self._lock:
            if self._closed:
                raise _closed(self._role)
            self._waiting.add(handle)
        threading.Thread(target=self._complete, args=(handle,), name=f"request of {self._role}", daemon=True).start()
        return handle

    def _complete(self, handle: FutureHandle) -> None:
        """Sample a response in a worker and complete the handle; runs in a thread."""
        r = handle.request
        try:
            with self._worker() as worker:
                arguments = (r.id, r.response_index, r.prompt_ids, r.config, r.seed)
                fields = self._group.ask(self._role, "complete", [arguments], only=worker)[0]
            self._end(handle, Completion(*fields))
        except BaseException as error:
            self._end(handle, error)

    def _end(self, handle: FutureHandle, outcome: Completion | BaseException) -> None:
        """Complete a handle, unless it was cancelled or the sampler was closed."""
        with self._lock:
            waited = handle in self._waiting
            self._waiting.discard(handle)
        if not waited or not handle.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Completion):
            handle.future.set_result(outcome)
        else:
            handle.future.set_exception(outcome)

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """See `Sampler.generate`."""
        with self._worker() as worker:
            sampled: SequenceSample = self._group.ask(self._role, "sample", [(data, config, seed)], only=worker)[0]
        return sampled

    def update(self, source: WeightSource, version: int) -> None:
        """See `Sampler.update`; returns after all workers have the new weights."""
        self._group.ask(self._role, "update", [(source.weights(), version)])
        self._version = version

    def pause(self) -> None:
        """See `Sampler.pause`."""
        self._group.ask(self._role, "pause", [()])

    def resume(self) -> None:
        """See `Sampler.resume`."""
        self._group.ask(self._role, "resume", [()])

    def sleep(self) -> None:
        """See `Sampler.sleep`."""
        self._group.ask(self._role, "sleep", [()])

    def wake(self) -> None:
        """See `Sampler.wake`."""
        self._group.ask(self._role, "wake", [()])

    def close(self) -> None:
        """See `Sampler.close`; kills the workers."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, set()
        for handle in waiting:
            if handle.future.set_running_or_notify_cancel():
                handle.future.set_exception(_closed(self._role))
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


def _closed(role: str) -> RuntimeError:
    return RuntimeError(f"The sampler of models.{role} is closed.")

"""`WorkerGroup`: the driver's handle to the worker processes that serve the same roles."""

from __future__ import annotations

import pickle
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray import cloudpickle
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from realign.runtime.processes.agreement import check_same, software
from realign.runtime.processes.placement import RoleGroup
from realign.runtime.processes.watchdog import WorkerHangs, WorkerLost
from realign.runtime.ray.host import Loaded
from realign.runtime.ray.wire_format import from_wire, shapes_of, to_wire
from realign.runtime.ray.worker import RayWorker, Reply, Setup, WorkerFailure
from realign.runtime.runtime_spec import RuntimeSpec


@dataclass
class Hops:
    """RPC overhead of one call of the graph, which may send several requests to workers."""

    name: str
    """Name of the call."""
    seconds: float = 0.0
    """Seconds without computation in a worker: pickling, transfer, and waiting for workers that another call uses."""


_CURRENT: ContextVar[Hops | None] = ContextVar("hops", default=None)


@contextmanager
def counted_hops(name: str) -> Iterator[Hops]:
    """Attribute the RPC overhead of this context and thread to the call `name`."""
    hops = Hops(name)
    token = _CURRENT.set(hops)
    try:
        yield hops
    finally:
        _CURRENT.reset(token)


def current_hops() -> Hops | None:
    """Return the RPC overhead record of the current call; None outside of a call."""
    return _CURRENT.get()


GRACE_S = 5.0
"""Seconds to wait after the error of one rank for the death of another rank that may have caused it."""


class RemoteError(Exception):
    """An unexpected error in a worker. The message contains the worker's traceback."""


class WorkerGroup:
    """Worker processes of one `RoleGroup`, one for each rank. All of them receive the same request at the same time."""

    def __init__(self, group: RoleGroup, spec: RuntimeSpec, room: PlacementGroup, setup: Setup, *, gpu: bool) -> None:
        """Start the processes, each in its bundle of `room`; `ready` waits for them.

        With `setup.callers` above 1 they are independent workers, not ranks. Each request goes to one of them, from
        many threads.
        """
        self.group = group
        self._alone = setup.callers == 1
        self.busy = threading.RLock()
        """Lock for requests to the ranks, which must run their collectives in the same order."""
        self._limit_s = 60 * spec.call_minutes
        self._warned: dict[Any, Any] = {}
        self._ended_by: BaseException | None = None
        self.pids: list[int] = []
        """Process ids of the ranks; empty before `ready`."""
        actor = ray.remote(RayWorker)
        self._workers: list[Any] = [
            actor.options(
                num_cpus=1,
                num_gpus=int(gpu),
                max_restarts=0,  # a restarted worker would lack its state, and a retried call would run twice
                max_task_retries=0,
                max_concurrency=setup.callers,
                scheduling_strategy=PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=rank),
            ).remote(rank, group.devices, setup)
            for rank in range(group.devices)
        ]

    def __len__(self) -> int:
        """Return the number of processes."""
        return len(self._workers)

    def ready(self) -> None:
        """Wait until all processes have started and, if there are several ranks, joined a process group.

        Raises:
            ConfigError: A worker has another version of a package than the driver.
        """
        self.pids = self._gathered([worker.pid.remote() for worker in self._workers], "start")
        versions = self._gathered([worker.software.remote() for worker in self._workers], "start")
        workers = {self._workers_of(f"worker {rank}", None): facts for rank, facts in enumerate(versions)}
        check_same({"the driver": software(), **workers})
        if len(self) > 1 and self._alone:
            point = self._gathered([self._workers[0].meeting_point.remote()], "start")[0]
            self._values([worker.join.remote(point, self._limit_s / 60) for worker in self._workers], "join")

    def load(self, specs: Mapping[str, Any], seed: int) -> dict[str, list[Loaded]]:
        """Load the models of these roles, and return what each rank loaded, by role."""
        loaded: list[dict[str, Loaded]] = self._load((dict(specs), seed, self.group.offload))
        return {role: [of_rank[role] for of_rank in loaded] for role in specs}

    def load_copies(self, specs: Mapping[str, Any], seed: int, *, recompute: bool) -> None:
        """Load copies of the models of these roles in every process; see `Host.load_copies`."""
        self._load((dict(specs), seed, recompute))

    def _load(self, arguments: tuple[Any, ...]) -> list[Any]:
        pickled = _pickled(arguments, f"models.{self.group.name}")
        return self._values([worker.load.remote(pickled) for worker in self._workers], "load")

    def ask(
        self, role: str, verb: str, parts: Sequence[tuple[Any, ...]], hook: Any = None, *, only: int | None = None
    ) -> list[Any]:
        """Call a method of `Host` on every rank.

        Args:
            role: Role of the model.
            verb: Name of the method.
            parts: Arguments for each rank. A single entry is sent to all ranks.
            hook: Function that replaces `HOOK` in the arguments.
            only: Index of the only rank to call. None calls all ranks.

        Returns:
            The results in rank order. Their tensors are read-only.

        Raises:
            ValueError: The hook cannot be pickled.
            RealignError: The worker raised this error.
            OSError: The worker raised this error.
            OutOfMemoryError: A device of the worker, or its host, has no memory left.
            WorkerLost: A worker died.
            RemoteError: A worker failed unexpectedly. The message contains its traceback.
            WorkerHangs: A rank did not answer in time.
            BaseException: The error that ended the group in another thread.
        """
        started = time.perf_counter()
        pickled = None if hook is None else _pickled(hook, f"models.{role}: the function passed to {verb}")
        asked = self._workers if only is None else [self._workers[only]]
        sent = [to_wire(part) for part in parts]
        if len(sent) == 1 and len(asked) > 1:
            sent = [ray.put(sent[0])] * len(asked)
        with self.busy if self._alone else nullcontext():
            refs = [worker.ask.remote(role, verb, x, pickled) for worker, x in zip(asked, sent, strict=True)]
            replies = self._replies(refs, f"{role}: {verb}", parts, first=only or 0)
        values = [from_wire(reply.value) for reply in replies]
        if (hops := current_hops()) is not None:
            hops.seconds += time.perf_counter() - started - max(reply.seconds for reply in replies)
        return values

    def kill(self) -> None:
        """Kill the processes immediately."""
        for worker in self._workers:
            with suppress(RayError, ValueError):  # the process has already exited
                ray.kill(worker, no_restart=True)

    def _values(self, refs: list[Any], what: str) -> list[Any]:
        return [reply.value for reply in self._replies(refs, what)]

    def _replies(
        self, refs: list[Any], what: str, parts: Sequence[tuple[Any, ...]] = (), first: int = 0
    ) -> list[Reply]:
        replies: list[Reply] = self._gathered(refs, what, parts, first)
        for warned in (warned for reply in replies for warned in reply.warned):
            warnings.warn_explicit(
                warned.text, warned.category, warned.filename, warned.line, self.__module__, self._warned
            )
        return replies

    def _gathered(self, refs: list[Any], what: str, parts: Sequence[tuple[Any, ...]] = (), first: int = 0) -> list[Any]:
        """Wait for the answers of the ranks from `first` on, one ref per rank.

        The time limit applies to calls of the graph only. If one of several ranks fails, the group is killed, because
        the other ranks may wait for the failed rank forever.
        """
        rank_of = {ref: rank for rank, ref in enumerate(refs, first)}
        answers: dict[int, Any] = {}
        pending, deadline = list(refs), time.monotonic() + self._limit_s
        try:
            while pending:
                left = None if current_hops() is None else max(0.0, deadline - time.monotonic())
                done, pending = ray.wait(pending, timeout=left)
                if not done:
                    raise self._hang(what, [rank_of[ref] for ref in pending], parts)
                for ref in done:
                    answers[rank_of[ref]] = answer = self._answer(ref, what, rank_of[ref])
                    if isinstance(answer, Reply) and answer.failure is not None:
                        self._look_for_the_dead(pending, what, rank_of)
                        raise self._error(answer.failure, what, rank_of[ref])
        except BaseException as error:
            if pending or len(self) > 1:
                self._ended_by = error
                self.kill()
            raise
        return [answers[rank_of[ref]] for ref in refs]

    def _answer(self, ref: Any, what: str, rank: int) -> Any:
        try:
            return ray.get(ref)
        except RayTaskError as error:  # not handled in the worker, such as arguments that cannot be unpickled
            raise RemoteError(f"{self._where(what, rank)} failed:\n{error}") from None
        except RayError as error:
            if self._ended_by is not None:  # not a worker death: another thread killed the group
                raise self._ended_by from None
            first = next(iter(str(error).strip().splitlines()), "")
            raise WorkerLost(f"{self._where(what, rank)}: the worker died ({type(error).__name__}: {first})") from error

    def _look_for_the_dead(self, pending: list[Any], what: str, rank_of: Mapping[Any, int]) -> None:
        """Raise WorkerLost if another rank died. Its death may be detected later than the failures that it causes."""
        if not pending:
            return
        for ref in ray.wait(pending, num_returns=len(pending), timeout=GRACE_S)[0]:
            self._answer(ref, what, rank_of[ref])

    def _error(self, failure: WorkerFailure, what: str, rank: int) -> Exception:
        there = RemoteError(f"{self._where(what, rank)} failed:\n\n{failure.traceback}")
        if failure.out_of_memory:  # the caller, `memory_limited`, adds the setting that lowers the memory use
            error: Exception = torch.OutOfMemoryError(f"{self._workers_of(what, rank)}: {failure.text}")
        elif failure.error is None:
            return there
        else:
            error = pickle.loads(failure.error)
        error.__cause__ = there
        return error

    def _hang(self, what: str, ranks: list[int], parts: Sequence[tuple[Any, ...]]) -> WorkerHangs:
        shapes = [shapes_of(part) for part in parts]
        given = "; ".join(f"rank {rank}: {shapes[min(rank, len(shapes) - 1)]}" for rank in ranks if any(shapes))
        return WorkerHangs(
            f"{self._where(what)}: rank {', '.join(map(str, ranks))} did not answer within "
            f"runtime.rpc_timeout_minutes={self._limit_s / 60:g}. Restart the run with resume=auto."
            f"{' Data: ' if given else ''}{given}"
        )

    def _where(self, what: str, rank: int | None = None) -> str:
        hops = current_hops()
        return (f"RPC {hops.name!r}, " if hops is not None else "") + self._workers_of(what, rank)

    def _workers_of(self, what: str, rank: int | None) -> str:
        of = f" on rank {rank} of {len(self)}" if rank is not None and len(self) > 1 else ""
        return f"{what}{of} (workers of {' + '.join(self.group.roles)})"


def _pickled(x: Any, what: str) -> bytes:
    try:
        return cloudpickle.dumps(x)
    except Exception as error:
        raise ValueError(
            f"{what} cannot be pickled for a worker ({type(error).__name__}: {error}). Define it at module level."
        ) from error

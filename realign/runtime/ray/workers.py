"""Worker processes: `_RayWorker` answers calls in each of them, and `WorkerGroup` is the driver's handle to them.

A call is answered with a `Reply`, which contains the error of a call that failed.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import ray
import torch
from ray import cloudpickle
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from realign.errors import RealignError
from realign.ranks import current
from realign.records.checkpoint.random_generators import seed_random
from realign.runtime.out_of_memory import is_out_of_memory
from realign.runtime.processes.agreement import check_same, software
from realign.runtime.processes.placement import RoleGroup
from realign.runtime.processes.watchdog import WorkerHangs, WorkerLost
from realign.runtime.ray.host import WHOLE, Host, Loaded
from realign.runtime.ray.wire_format import from_wire, shapes_of, to_wire
from realign.runtime.runtime_spec import RuntimeSpec

HOOK = "<hook>"
"""Placeholder in the arguments for the function that is sent with a call."""


@dataclass(frozen=True)
class Setup:
    """Settings that a worker takes over from the driver."""

    folder: str
    """Current working directory."""
    path: tuple[str, ...]
    """Module search path, so that driver and worker import the same user code."""
    threads: int
    """CPU threads of torch. The rounding of sums depends on this number."""
    seed: int
    """Seed of the run."""
    callers: int = 1
    """Maximum number of concurrent calls."""


@dataclass(frozen=True)
class Warned:
    """A warning that a call emitted."""

    text: str
    category: type[Warning]
    filename: str
    line: int


@dataclass(frozen=True)
class WorkerFailure:
    """An exception that a call raised."""

    kind: str
    text: str
    traceback: str
    error: bytes | None
    """The pickled exception if it is a `RealignError` or an `OSError`, and None otherwise."""
    out_of_memory: bool = False
    """Whether a device, or the host, has no memory left."""


@dataclass(frozen=True)
class Reply:
    """The reply of a worker to a call."""

    seconds: float
    """Duration of the call in the worker, in seconds, without transfer."""
    value: Any = None
    failure: WorkerFailure | None = None
    warned: list[Warned] = field(default_factory=list)


class _RayWorker:
    """One rank of a group, in a separate process.

    Every method except `pid`, `software` and `rendezvous_address` returns a `Reply`.
    """

    def __init__(self, rank: int, size: int, setup: Setup) -> None:
        """Set up this process as rank `rank` of `size`."""
        self._rank = rank
        self._size = size
        with suppress(OSError):  # the folder may not exist on another machine
            os.chdir(setup.folder)
        # at the end: the packages of the worker's machine win over paths of the driver
        sys.path += [entry for entry in setup.path if entry not in sys.path]
        torch.set_num_threads(setup.threads)
        seed_random(setup.seed)
        self._threads = setup.threads
        self._alone = setup.callers == 1
        self._host = Host(rank, size)

    def pid(self) -> int:
        """Return the process id; also serves as a health check."""
        return os.getpid()

    def software(self) -> dict[str, str]:
        """Return the versions of this process; see `agreement.software`."""
        return software()

    def rendezvous_address(self) -> tuple[str, int]:
        """Return host and port for the rendezvous of the group's ranks; called on rank 0."""
        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, probe.getsockname()[1]

    def join(self, point: tuple[str, int], minutes: float) -> Reply:
        """Join the other ranks of the group in torch's default process group."""

        def meet() -> None:
            import torch.distributed as dist

            if point[0].startswith("127."):
                # all ranks are on this machine; gloo would otherwise take the address of the hostname, which need not
                # resolve
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                init_method=f"tcp://{point[0]}:{point[1]}",
                rank=self._rank,
                world_size=self._size,
                timeout=timedelta(minutes=minutes),
            )
            assert current().size == self._size

        return _answer(meet)

    def load(self, pickled: bytes) -> Reply:
        """Call `Host.load`, or `Host.load_copies` if the worker serves concurrent calls.

        The arguments are pickled, because user code can be imported only after `__init__`.
        """

        def load() -> Any:
            from transformers.utils import logging

            logging.disable_progress_bar()
            torch.set_num_threads(self._threads)  # per thread; a worker with concurrent calls has many threads
            arguments = cloudpickle.loads(pickled)
            return self._host.load(*arguments) if self._alone else self._host.load_copies(*arguments)

        return _answer(load)

    def ask(self, role: str, verb: str, arguments: Any, hook: bytes | None) -> Reply:
        """See `Host.ask`.

        Args:
            role: Role of the model.
            verb: Name of a method of `Host`.
            arguments: Arguments of that method, without the role.
            hook: Pickled function that replaces `HOOK` in the arguments.
        """

        def ask() -> Any:
            function = None if hook is None else cloudpickle.loads(hook)
            given = tuple(function if isinstance(x, str) and x == HOOK else from_wire(x) for x in arguments)
            value = self._host.ask(role, verb, given)
            return to_wire(value) if self._rank == 0 or verb not in WHOLE else None

        return _answer(ask, hear=self._alone)


def _answer(action: Callable[[], Any], *, hear: bool = True) -> Reply:
    """Run `action` and return its result or error. With `hear` (single-threaded workers), also collect warnings."""
    started = time.perf_counter()
    value, failure = None, None
    # `catch_warnings` changes the whole process, so it must not be used from concurrent calls
    hearing: AbstractContextManager[list[Warned]] = _collecting_warnings() if hear else nullcontext([])
    with hearing as warned:
        try:
            value = action()
        except Exception as error:
            failure = _failure(error)
    return Reply(time.perf_counter() - started, value, failure, warned)


@contextmanager
def _collecting_warnings() -> Iterator[list[Warned]]:
    """Collect warnings, so that the driver can emit them under its own warning filters."""
    collected: list[Warned] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        for category in (UserWarning, RuntimeWarning):
            warnings.filterwarnings("always", category=category)
        yield collected
    collected += [Warned(str(w.message), w.category, w.filename, w.lineno) for w in caught]


def _failure(error: Exception) -> WorkerFailure:
    pickled = None
    if isinstance(error, RealignError | OSError):  # the driver handles these as if they were raised there
        with suppress(Exception):  # an error that cannot be unpickled is sent as text
            data = pickle.dumps(error)
            # some exceptions can be pickled, but not read back, such as those whose constructor takes other arguments
            pickle.loads(data)
            pickled = data
    text = "".join(traceback.format_exception(error)).rstrip()
    return WorkerFailure(type(error).__name__, str(error), text, pickled, is_out_of_memory(error))


@dataclass
class Hops:
    """RPC overhead of one call of the graph, which may send several requests to workers."""

    name: str
    """Name of the call."""
    seconds: float = 0.0
    """Seconds without computation in a worker: pickling, transfer, and waiting for workers that another call uses."""


_CURRENT: ContextVar[Hops | None] = ContextVar("hops", default=None)


@contextmanager
def counting_hops(name: str) -> Iterator[Hops]:
    """Attribute the RPC overhead of this context and thread to the call `name`."""
    hops = Hops(name)
    token = _CURRENT.set(hops)
    try:
        yield hops
    finally:
        _CURRENT.reset(token)


def _current_hops() -> Hops | None:
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
        actor = ray.remote(_RayWorker)
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
        self.pids = self._gather([worker.pid.remote() for worker in self._workers], "start")
        versions = self._gather([worker.software.remote() for worker in self._workers], "start")
        workers = {self._workers_of(f"worker {rank}", None): facts for rank, facts in enumerate(versions)}
        check_same({"the driver": software(), **workers})
        if len(self) > 1 and self._alone:
            point = self._gather([self._workers[0].rendezvous_address.remote()], "start")[0]
            self._values([worker.join.remote(point, self._limit_s / 60) for worker in self._workers], "join")

    def load(self, specs: Mapping[str, Any], seed: int) -> dict[str, list[Loaded]]:
        """Load the models of these roles, and return what each rank loaded, by role."""
        loaded: list[dict[str, Loaded]] = self._load((dict(specs), seed, self.group.offload))
        return {role: [of_rank[role] for of_rank in loaded] for role in specs}

    def load_copies(self, specs: Mapping[str, Any], seed: int, *, recompute: bool) -> None:
        """Load copies of the models of these roles in every process; see `Host.load_copies`."""
        self._load((dict(specs), seed, recompute))

    def _load(self, arguments: tuple[Any, ...]) -> list[Any]:
        pickled = _pickle(arguments, f"models.{self.group.name}")
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
        pickled = None if hook is None else _pickle(hook, f"models.{role}: the function passed to {verb}")
        asked = self._workers if only is None else [self._workers[only]]
        different = {id(part): part for part in parts}
        sent = {same: to_wire(part) for same, part in different.items()}
        if len(sent) < len(asked):
            # Ray would otherwise serialize the same arguments once for each worker
            sent = {same: ray.put(arguments) for same, arguments in sent.items()}
        to_each = [sent[id(part)] for part in (parts if len(parts) > 1 else [*parts] * len(asked))]
        with self.busy if self._alone else nullcontext():
            refs = [worker.ask.remote(role, verb, x, pickled) for worker, x in zip(asked, to_each, strict=True)]
            replies = self._replies(refs, f"{role}: {verb}", parts, first=only or 0)
        values = [from_wire(reply.value) for reply in replies]
        if (hops := _current_hops()) is not None:
            # the slowest rank determines how long the call had to take
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
        replies: list[Reply] = self._gather(refs, what, parts, first)
        for warned in (warned for reply in replies for warned in reply.warned):
            warnings.warn_explicit(
                warned.text, warned.category, warned.filename, warned.line, self.__module__, self._warned
            )
        return replies

    def _gather(self, refs: list[Any], what: str, parts: Sequence[tuple[Any, ...]] = (), first: int = 0) -> list[Any]:
        """Wait for the answers of the ranks from `first` on, one ref per rank.

        The time limit applies to calls of the graph only. If one of several ranks fails, the group is killed, because
        the other ranks may wait for the failed rank forever.
        """
        rank_of = {ref: rank for rank, ref in enumerate(refs, first)}
        answers: dict[int, Any] = {}
        pending, deadline = list(refs), time.monotonic() + self._limit_s
        try:
            while pending:
                left = None if _current_hops() is None else max(0.0, deadline - time.monotonic())
                done, pending = ray.wait(pending, timeout=left)
                if not done:
                    raise self._hang(what, [rank_of[ref] for ref in pending], parts)
                for ref in done:
                    answers[rank_of[ref]] = answer = self._answer(ref, what, rank_of[ref])
                    if isinstance(answer, Reply) and answer.failure is not None:
                        self._look_for_the_dead(pending, what, rank_of)
                        raise self._error(answer.failure, what, rank_of[ref])
        except BaseException as error:
            # a single worker that has answered is not stuck, and serves further calls after an error
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
        hops = _current_hops()
        return (f"RPC {hops.name!r}, " if hops is not None else "") + self._workers_of(what, rank)

    def _workers_of(self, what: str, rank: int | None) -> str:
        of = f" on rank {rank} of {len(self)}" if rank is not None and len(self) > 1 else ""
        return f"{what}{of} (workers of {' + '.join(self.group.roles)})"


def _pickle(x: Any, what: str) -> bytes:
    try:
        return cloudpickle.dumps(x)
    except Exception as error:
        raise ValueError(
            f"{what} cannot be pickled for a worker ({type(error).__name__}: {error}). Define it at module level."
        ) from error

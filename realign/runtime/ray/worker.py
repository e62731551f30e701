"""`RayWorker`: the process of one rank. It answers calls with a `Reply`, which contains the error of a failed call."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import ray
import torch
from ray import cloudpickle

from realign.engines.distributed.ranks import current
from realign.errors import RealignError
from realign.runtime.checkpoint.random_generators import seed_random
from realign.runtime.out_of_memory import is_out_of_memory
from realign.runtime.processes.agreement import software
from realign.runtime.ray.host import WHOLE, Host
from realign.runtime.ray.wire_format import from_wire, to_wire

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


class RayWorker:
    """One rank of a group, in a separate process.

    Every method except `pid`, `software` and `meeting_point` returns a `Reply`.
    """

    def __init__(self, rank: int, size: int, setup: Setup) -> None:
        """Set up this process as rank `rank` of `size`."""
        self._rank = rank
        self._size = size
        with suppress(OSError):  # the folder may not exist on another machine
            os.chdir(setup.folder)
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

    def meeting_point(self) -> tuple[str, int]:
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
    hearing: AbstractContextManager[list[Warned]] = _heard() if hear else nullcontext([])
    with hearing as warned:
        try:
            value = action()
        except Exception as error:
            failure = _failure(error)
    return Reply(time.perf_counter() - started, value, failure, warned)


@contextmanager
def _heard() -> Iterator[list[Warned]]:
    """Collect warnings, so that the driver can emit them under its own warning filters."""
    heard: list[Warned] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        for category in (UserWarning, RuntimeWarning):
            warnings.filterwarnings("always", category=category)
        yield heard
    heard += [Warned(str(w.message), w.category, w.filename, w.lineno) for w in caught]


def _failure(error: Exception) -> WorkerFailure:
    pickled = None
    if isinstance(error, RealignError | OSError):  # the driver handles these as if they were raised there
        with suppress(Exception):  # an error that cannot be unpickled is sent as text
            made = pickle.dumps(error)
            pickle.loads(made)
            pickled = made
    text = "".join(traceback.format_exception(error)).rstrip()
    return WorkerFailure(type(error).__name__, str(error), text, pickled, is_out_of_memory(error))

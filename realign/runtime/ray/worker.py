"""`Worker`: the process of one rank. It answers calls, and tells what went wrong rather than raise it."""

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
from realign.mistakes import raised_on_purpose
from realign.runtime.checkpoint.state import seed_random
from realign.runtime.ray.host import WHOLE, Host
from realign.runtime.ray.wire_format import from_wire, to_wire

HOOK = "<hook>"
"""Stands for the function that a call brings along."""


@dataclass(frozen=True)
class Setup:
    """What a worker has in common with the process that drives it."""

    folder: str
    """The current one."""
    path: tuple[str, ...]
    """Where modules are found: a class of the user's own file must be the same in both."""
    threads: int
    """CPU threads of torch. The bits of a sum depend on them."""
    seed: int
    """Of the run."""
    callers: int = 1
    """Calls that it serves at a time."""


@dataclass(frozen=True)
class Warned:
    """A warning that a call gave."""

    text: str
    category: type[Warning]
    filename: str
    line: int


@dataclass(frozen=True)
class Failure:
    """An exception that a call raised."""

    kind: str
    text: str
    traceback: str
    error: bytes | None
    """It, pickled, if realign raised it on purpose: it speaks for itself."""


@dataclass(frozen=True)
class Reply:
    """What a worker says to a call."""

    seconds: float
    """That it took here, without its way to and fro."""
    value: Any = None
    failure: Failure | None = None
    warned: list[Warned] = field(default_factory=list)


class Worker:
    """One rank of a group, in a process of its own. Every method but `pid` and `meeting_point` gives a `Reply`."""

    def __init__(self, rank: int, size: int, setup: Setup) -> None:
        """Become rank `rank` of `size`."""
        self._rank = rank
        self._size = size
        with suppress(OSError):  # on another machine the folder may not be there
            os.chdir(setup.folder)
        sys.path += [entry for entry in setup.path if entry not in sys.path]
        torch.set_num_threads(setup.threads)
        seed_random(setup.seed)
        self._threads = setup.threads
        self._alone = setup.callers == 1
        self._host = Host(rank, size)

    def pid(self) -> int:
        """Of the process; also says that it is there."""
        return os.getpid()

    def meeting_point(self) -> tuple[str, int]:
        """Of rank 0: where the ranks of the group can meet."""
        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, probe.getsockname()[1]

    def join(self, point: tuple[str, int], minutes: float) -> Reply:
        """Meet the other ranks: they become torch's default process group."""

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
        """`Host.load`, or `Host.load_copies` where there are many callers.

        Given the pickle of its arguments, since user code is found only now.
        """

        def load() -> Any:
            from transformers.utils import logging

            logging.disable_progress_bar()
            torch.set_num_threads(self._threads)  # of this thread, which a worker with many callers has many of
            arguments = cloudpickle.loads(pickled)
            return self._host.load(*arguments) if self._alone else self._host.load_copies(*arguments)

        return _answer(load)

    def ask(self, role: str, verb: str, arguments: Any, hook: bytes | None) -> Reply:
        """See `Host.ask`.

        Args:
            role: whose model is meant.
            verb: a method of `Host`.
            arguments: of it, but for the role.
            hook: a pickled function that takes the place of `HOOK` among the arguments.
        """

        def ask() -> Any:
            function = None if hook is None else cloudpickle.loads(hook)
            given = tuple(function if isinstance(x, str) and x == HOOK else from_wire(x) for x in arguments)
            value = self._host.ask(role, verb, given)
            return to_wire(value) if self._rank == 0 or verb not in WHOLE else None

        return _answer(ask, hear=self._alone)


def _answer(action: Callable[[], Any], *, hear: bool = True) -> Reply:
    """What `action` gives or raises, and unless other threads are at work, too, the warnings that it gives."""
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
    """Collect warnings: the driver gives them, and decides by its own filters which of them are shown."""
    heard: list[Warned] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        for category in (UserWarning, RuntimeWarning):
            warnings.filterwarnings("always", category=category)
        yield heard
    heard += [Warned(str(w.message), w.category, w.filename, w.lineno) for w in caught]


def _failure(error: Exception) -> Failure:
    pickled = None
    if raised_on_purpose(error):
        with suppress(Exception):  # one that cannot be made again is told by its text
            made = pickle.dumps(error)
            pickle.loads(made)
            pickled = made
    text = "".join(traceback.format_exception(error)).rstrip()
    return Failure(type(error).__name__, str(error), text, pickled)

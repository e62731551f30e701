"""`Ranks`: the processes of one distributed run, and the collectives on Python objects that they use."""

from __future__ import annotations

import copy
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from realign.errors import ConfigError

T = TypeVar("T")

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that a launcher such as torchrun sets for each process of a run."""


@dataclass(frozen=True)
class Ranks:
    """One process and its group. With several processes each method is a collective: all ranks must call it.

    Objects are sent as pickles, only between processes of one run.
    """

    rank: int = 0
    """Index of this process, from 0."""
    size: int = 1
    """Number of processes."""

    @property
    def leader(self) -> bool:
        """Whether this process is rank 0, which computes rewards, writes files and shows progress."""
        return self.rank == 0

    def broadcast(self, x: T) -> T:
        """Return the value of rank 0; `x` on other ranks is ignored."""
        if self.size == 1:
            return x
        import torch.distributed as dist

        box = [x if self.leader else None]
        dist.broadcast_object_list(box, src=0)
        return box[0]  # type: ignore[return-value]

    def gather(self, x: T) -> list[T]:
        """Return the values of all ranks, in rank order."""
        if self.size == 1:
            return [x]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, x)
        return values

    def first(self, x: T | None) -> T | None:
        """Return the first value across ranks that is not None; None if there is none."""
        return next((value for value in self.gather(x) if value is not None), None)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather(None)

    def lead(self, action: Callable[[], T]) -> T:
        """Call `action` on rank 0 only, and return its result, or raise its exception, on every rank.

        Use it for work that only one process may do or decide: computing rewards, writing files, reading a clock.
        `action` must not call methods of `Ranks`.
        """
        if self.size == 1:
            return action()
        result, error = None, None
        if self.leader:
            try:
                result = action()
            except Exception as raised:
                error = raised
        # The error travels in place of the result. If rank 0 raised before the broadcast, the others would wait in it
        # forever.
        result, failure = self.broadcast((result, error and _sendable(error)))
        if error is not None:
            raise _mark(error, _EVERYWHERE)  # the original error, with its traceback
        if failure is not None:
            raise _mark(failure, _MARK)
        return result  # type: ignore[return-value]

    def together(self, action: Callable[[], T]) -> T:
        """Call `action` on every rank and return this rank's result; if it raises on one rank, raise on all ranks.

        This keeps ranks in step if an error occurs on some of them only, such as a full disk.
        """
        if self.size == 1:
            return action()
        result, error = None, None
        try:
            result = action()
        except Exception as raised:
            error = raised
        # Every rank takes part, also one that failed, so that none waits for it.
        failure = self.first(error and _sendable(error))
        if error is not None:
            raise _mark(error, _EVERYWHERE)
        if failure is not None:
            raise _mark(failure, _MARK)
        return result  # type: ignore[return-value]


_MARK, _EVERYWHERE = "_realign_of_another_rank", "_realign_on_all_ranks"
_KNOWN_EVERYWHERE = ("builtins", "realign", "torch")


def is_of_another_rank(error: BaseException) -> bool:
    """Return whether `lead` or `together` raised the error on this rank because another rank raised it."""
    return _MARK in vars(error)


def is_on_all_ranks(error: BaseException) -> bool:
    """Return whether every rank raises this error, so that all of them can still do something together."""
    return current().size == 1 or bool({_MARK, _EVERYWHERE} & vars(error).keys())


def _mark(error: Exception, mark: str) -> Exception:
    vars(error)[mark] = True
    return error


def _sendable(error: Exception) -> Exception:
    """Return the error, or a RuntimeError with its text if another process could not unpickle it."""
    # A class of a user's file or of a package that only rank 0 has imported may be missing on another rank.
    if type(error).__module__.partition(".")[0] not in _KNOWN_EVERYWHERE:
        return RuntimeError(f"{type(error).__name__}: {error}")
    try:
        pickle.dumps(copy.copy(error))  # copying calls the class, as unpickling does
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def ranks_of_launcher() -> Ranks:
    """Return the ranks that a launcher has configured (`LAUNCHED`), whether or not they have joined; else one rank.

    Raises:
        ConfigError: the variables are not integers, or the rank is out of range.
    """
    if any(not os.environ.get(name) for name in LAUNCHED):
        return Ranks()
    rank, size = _integer("RANK"), _integer("WORLD_SIZE")
    if size > 1 and not 0 <= rank < size:
        raise ConfigError(f"RANK={rank}: must be at least 0 and below WORLD_SIZE={size}. Start the run with torchrun.")
    return Ranks(rank, size) if size > 1 else Ranks()


def expected_size() -> int:
    """Return the number of ranks of this run, whether or not they have joined."""
    return max(current().size, ranks_of_launcher().size)


def command_words() -> list[str]:
    """Return the words that start realign as this process was started: `realign`, or torchrun with its processes."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or current().size == 1:
        return ["realign"]
    local = int(os.environ.get("LOCAL_WORLD_SIZE", current().size))
    nodes = current().size // local
    several = ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:PORT"] if nodes > 1 else []
    return ["torchrun", *several, "--nproc-per-node", str(local), "-m", "realign"]


def _integer(variable: str) -> int:
    """Return the value of an environment variable that a launcher sets."""
    text = os.environ[variable]
    try:
        return int(text)
    except ValueError as error:
        cure = f"Start the run with torchrun, or unset {variable}."
        raise ConfigError(f"{variable}={text!r}: must be an integer. {cure}") from error


def current() -> Ranks:
    """Return the ranks of torch's default process group; one rank if there is no group."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return Ranks()
    return Ranks(dist.get_rank(), dist.get_world_size())

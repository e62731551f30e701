"""`Ranks`: the processes that make one run together, and what they tell each other."""

from __future__ import annotations

import copy
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that a launcher such as torchrun gives each process of a run."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of its group. Where there are several, each method is a collective: all must call it.

    Objects travel as pickles, between processes of one run only.
    """

    rank: int = 0
    """Number of this process, from 0."""
    size: int = 1
    """Number of processes."""

    @property
    def leader(self) -> bool:
        """Whether this is the process that judges, writes files and shows progress."""
        return self.rank == 0

    def broadcast(self, x: T) -> T:
        """What rank 0 has; `x` of the others is ignored."""
        if self.size == 1:
            return x
        import torch.distributed as dist

        box = [x if self.leader else None]
        dist.broadcast_object_list(box, src=0)
        return box[0]  # type: ignore[return-value]

    def gather(self, x: T) -> list[T]:
        """What every rank has, in their order."""
        if self.size == 1:
            return [x]
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, x)
        return found

    def first(self, x: T | None) -> T | None:
        """What the first rank that has something has; None if none has."""
        return next((found for found in self.gather(x) if found is not None), None)

    def barrier(self) -> None:
        """Wait for all."""
        self.gather(None)

    def lead(self, action: Callable[[], T]) -> T:
        """What `action` gives on rank 0, which alone calls it; an exception of it is raised on every rank.

        For what only one process may do or should decide: judging, writing files, reading a clock. `action` must call
        no method of `Ranks`.
        """
        if self.size == 1:
            return action()
        result, error = None, None
        if self.leader:
            try:
                result = action()
            except Exception as raised:
                error = raised
        result, told = self.broadcast((result, error and _sendable(error)))
        if error is not None:
            raise error  # with its traceback
        if told is not None:
            raise _marked(told)
        return result  # type: ignore[return-value]

    def together(self, action: Callable[[], T]) -> T:
        """What `action` gives on this rank; every rank calls it, and if it raises on one, all raise.

        So ranks go on together where an error is met by some of them only, such as a full disk.
        """
        if self.size == 1:
            return action()
        result, error = None, None
        try:
            result = action()
        except Exception as raised:
            error = raised
        found = self.first(error and _sendable(error))
        if error is not None:
            raise error
        if found is not None:
            raise _marked(found)
        return result  # type: ignore[return-value]


_MARK = "_realign_of_another_rank"
_EVERYWHERE = ("builtins", "realign", "torch")


def is_of_another_rank(error: BaseException) -> bool:
    """Whether `lead` or `together` raised it here because another rank met it."""
    return _MARK in vars(error)


def _marked(error: Exception) -> Exception:
    vars(error)[_MARK] = True
    return error


def _sendable(error: Exception) -> Exception:
    """The error, or its text where another process could not make it again: from a pickle, of a class it knows."""
    if type(error).__module__.partition(".")[0] not in _EVERYWHERE:
        return RuntimeError(f"{type(error).__name__}: {error}")
    try:
        pickle.dumps(copy.copy(error))  # a copy is made as an unpickled one is: by calling its class
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def launched() -> Ranks:
    """The ranks that a launcher says there are (`LAUNCHED`), whether or not they have joined; else one rank.

    Raises:
        ValueError: the variables hold no numbers.
    """
    if any(not os.environ.get(name) for name in LAUNCHED):
        return Ranks()
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except ValueError as error:
        raise ValueError(f"RANK and WORLD_SIZE must be numbers, as torchrun sets them: {error}") from error
    return Ranks(rank, size) if size > 1 else Ranks()


def current() -> Ranks:
    """The ranks of torch's default process group, if there is one; else one rank."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return Ranks()
    return Ranks(dist.get_rank(), dist.get_world_size())

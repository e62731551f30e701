"""`Watch`: tracks what a process is doing, so that a watchdog and error messages can report it."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation in progress, such as a call of the graph."""

    what: str
    """Name for messages."""
    data: object
    """Input of the operation; None if there is none."""
    limited: bool
    """Whether the time limit of calls applies."""
    since: float
    """Start time on the monotonic clock, in seconds."""

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.since

    def describe(self, where: str = "") -> str:
        """Return a human-readable description; `where` is a location in the code."""
        return f"{self.what} for {self.seconds:.0f} s{where}" + ("" if self.data is None else f" on {self.data!r}")


class Watch:
    """Tracks the current operations of this process. Subclasses also watch their duration."""

    def __init__(self) -> None:
        self._operations: dict[Operation, None] = {}
        self._failed_in: Operation | None = None

    @contextmanager
    def doing(self, what: str, data: object = None, *, limited: bool = False) -> Iterator[None]:
        """Mark the context as operation `what` on `data`; `limited` applies the time limit."""
        operation = Operation(what, data, limited, time.monotonic())
        self._operations[operation] = None
        try:
            yield
        except BaseException:
            self._failed_in = self._failed_in or operation
            raise
        finally:
            del self._operations[operation]

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Report errors that leave this context to the other processes of the run."""
        yield

    @contextmanager
    def started(self) -> Iterator[None]:
        """Watch the operations inside this context."""
        yield

    def operations(self) -> list[Operation]:
        """Return the operations in progress, in the order of their start; callable from any thread."""
        return list(self._operations)


def stacks() -> str:
    """Return the Python stacks of all threads of this process, except the calling thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            lines = "".join(traceback.format_stack(frame))
            found.append(f"Thread {names.get(ident, ident)} (most recent call last):\n{lines}")
    return "\n".join(found)

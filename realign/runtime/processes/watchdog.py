"""Watchdog of a run in one process: reports operations that take too long, and can end a run that hangs.

A thread checks the duration of the current operations, which `Watch` tracks. It logs the stacks of all threads for an
operation that takes too long, and writes them to stderr before it ends a run.
`realign.runtime.processes.rank_watchdog` does the same for distributed runs, where a failure ends all ranks.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TypeAlias

from realign.errors import ExitCode, TransientError
from realign.runtime.runtime_spec import RuntimeSpec


class WorkerLost(TransientError):
    """A worker process died: killed, out of memory, or its machine failed. The run continues from a checkpoint."""


class WorkerHangs(TransientError):
    """A worker process did not complete a call of the graph within the time limit."""


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
    texts = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            lines = "".join(traceback.format_stack(frame))
            texts.append(f"Thread {names.get(ident, ident)} (most recent call last):\n{lines}")
    return "\n".join(texts)


LOOK_S = 0.5
"""Polling interval of the thread, in seconds."""
WORKERS_FIRST_S = 60.0
"""Seconds that a call with runtime=ray may exceed its limit, since the report of the worker group names the rank."""
GRACE_S = 10.0
"""Seconds that the run has to end after the watchdog ended it. After that, the thread terminates the process."""
END = None if sys.platform == "win32" else signal.SIGVTALRM
"""Signal that interrupts the main thread of a run that hangs, also in a blocking system call."""

Record: TypeAlias = Callable[[BaseException, int], None]
"""Records a failure that ends the run: the error, and the exit code of the process."""

logger = logging.getLogger(__name__)


class CallTimeout(KeyboardInterrupt):
    """A call of the graph exceeded its time limit in a single-process run.

    It is a KeyboardInterrupt, so that no `except Exception` of the code that hangs suppresses it.

    Attributes:
        exit_code: Exit code of the process, since a restart with `resume=auto` can fix a hang.
    """

    exit_code = int(ExitCode.transient)


class Watchdog(Watch):
    """Watches the operations of one process; it runs inside of `started`.

    Args:
        report_s: Seconds after which an operation is reported with the stacks of all threads. The run continues.
        limit_s: Seconds after which a limited operation ends the run with exit code 75. Infinite disables the limit.

    Attributes:
        record: Called before the watchdog terminates the process, which then has no other chance to record the failure.
    """

    def __init__(self, report_s: float = math.inf, limit_s: float = math.inf) -> None:
        super().__init__()
        self.report_s, self.limit_s = report_s, limit_s
        self.record: Record = _no_record
        self._reported: set[Operation] = set()
        self._over = threading.Event()
        self._interrupts: int | None = None
        self._message = ""

    @contextmanager
    def started(self) -> Iterator[None]:
        """Watch the operations inside this context, which may be entered again after it has ended."""
        if min(self.report_s, self.limit_s) == math.inf:
            yield
            return
        self._over.clear()
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        with self._interruptible():
            thread.start()
            try:
                yield
            finally:
                self._over.set()
                thread.join(LOOK_S)

    def exceeded(self) -> Operation | None:
        """Return the first operation that exceeds the time limit."""
        return next((o for o in self.operations() if o.limited and o.seconds > self.limit_s), None)

    def report_slow(self) -> None:
        """Report each operation that takes longer than `report_s`, once."""
        current = self.operations()
        self._reported &= set(current)
        for operation in current:
            if operation.seconds > self.report_s and operation not in self._reported:
                self._reported.add(operation)
                cure = " Set runtime.rpc_timeout_minutes to end a run whose calls hang."
                logger.warning(
                    "%s has not finished. The run continues.%s Stacks of all threads:\n%s",
                    operation.describe(),
                    cure if operation.limited and self.limit_s == math.inf else "",
                    stacks(),
                )

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            if (operation := self.exceeded()) is not None:
                self._end(operation)
                return
            self.report_slow()

    def _end(self, operation: Operation) -> None:
        """Interrupt the main thread, and terminate the process if that does not end the run."""
        limit = f"runtime.rpc_timeout_minutes={self.limit_s / 60:g}"
        self._message = f"{operation.what} exceeded {limit}. Restart the run with resume=auto."
        report = f"error: {operation.describe()} exceeds {limit}. The run ends. Stacks of all threads:\n{stacks()}\n"
        os.write(2, report.encode(errors="replace"))  # not the log, since the thread that hangs may hold its lock
        if self._interrupts is not None and END is not None:
            signal.pthread_kill(self._interrupts, END)
        if self._over.wait(GRACE_S):
            return
        self._recorded(CallTimeout(self._message), ExitCode.transient)
        os._exit(ExitCode.transient)

    def _recorded(self, error: BaseException, code: int) -> None:
        """Call `record`, whose own failure must not keep the process from ending."""
        try:
            self.record(error, code)
        except Exception as failed:
            os.write(2, f"warning: the failure of the run was not recorded ({failed!r}).\n".encode(errors="replace"))

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let `_end` raise `CallTimeout` in the main thread, if the run is in the main thread."""
        if END is None or self.limit_s == math.inf or threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: FrameType | None) -> None:
            raise CallTimeout(self._message)

        before = signal.signal(END, stop)
        self._interrupts = threading.get_ident()
        try:
            yield
        finally:
            self._interrupts = None
            signal.signal(END, before)


def _no_record(error: BaseException, code: int) -> None:
    """Record nothing: the caller of the run did not ask for a record."""


def watchdog_for(runtime: RuntimeSpec) -> Watchdog:
    """Return the watchdog of a run without torchrun. It ends the run only if a time limit is set."""
    seconds = 60 * runtime.call_minutes + (WORKERS_FIRST_S if runtime.starts_workers else 0)
    return Watchdog(seconds, math.inf if runtime.rpc_timeout_minutes is None else seconds)

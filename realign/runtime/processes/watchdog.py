"""Watchdogs of a run: report operations that take too long, and end a run that hangs or has lost a rank.

A thread checks the duration of the current operations, which `Watch` tracks. It logs the stacks of all threads for an
operation that takes too long, and writes them to stderr before it ends a run.

In distributed training, a rank that raises notifies the others through the launcher's store, because they may be
blocked in a collective. If one rank fails, hangs or is stopped, all ranks exit and one reports the cause.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias

from realign.console import write_stderr
from realign.errors import ExitCode, TransientError
from realign.ranks import Ranks, is_of_another_rank
from realign.runtime.runtime_spec import RuntimeSpec

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


class WorkerLost(TransientError):
    """A worker process died: killed, out of memory, or its machine failed. The run continues from a checkpoint."""


class WorkerHangs(TransientError):
    """A worker process did not complete a call of the graph within the time limit."""


# compared by identity: operations are keys, and their data need not be hashable
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
        # an ordered set; its single operations are atomic, so that other threads need no lock
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
            # the innermost operation sees the error first, and is the one to name
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
"""Seconds that the run has to end after the watchdog, or the first rank that exits, ended it. After that, the thread
terminates the process."""
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
        # forgets operations that have ended, whose data would stay in memory
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
        write_stderr(report)  # not the log, since the thread that hangs may hold its lock
        # to the main thread itself: a signal to the process might not interrupt its blocking system call
        if self._interrupts is not None and END is not None:
            signal.pthread_kill(self._interrupts, END)
        if self._over.wait(GRACE_S):
            return
        self._recorded(CallTimeout(self._message), ExitCode.transient)
        # `sys.exit` would end this thread only, and a normal exit could wait for the thread that hangs
        os._exit(ExitCode.transient)

    def _recorded(self, error: BaseException, code: int) -> None:
        """Call `record`, whose own failure must not keep the process from ending."""
        try:
            self.record(error, code)
        except Exception as failed:
            write_stderr(f"warning: the failure of the run was not recorded ({failed!r}).\n")

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


Describe: TypeAlias = Callable[[BaseException], tuple[str, int]]
"""Returns the message of an error for the user, and the exit code of the process."""

ENDED = "ended"
"""Key of the store: the first rank that exited, and its exit code."""
LOST = re.compile(r"Connection (closed|reset) by peer|[Rr]emote process exited")
"""Matches the errors of gloo and NCCL for a lost rank."""
LATE = re.compile(
    r"Timed out waiting \d+ ?ms|Timed out after \d+ seconds|[Ww]ait timeout|Socket Timeout|collective operation timeout"
)
"""Matches the errors of torch for a rank that did not join a collective in time."""
ANSWER_S = 3.0
"""Seconds to wait for the state reports of all ranks when one hangs."""


class RankWatch(Watchdog):
    """The watchdog of one rank in distributed training; it starts with `__enter__`.

    Args:
        ranks: This rank and the number of ranks.
        store: Store that all ranks share. The watchdog needs a separate connection, because its thread polls the store.
        describe: See `Describe`.

    Attributes:
        code: Exit code of this process, set when a rank fails.
        limit_s: Time limit of a limited operation, in seconds.
        record: Called on the first rank that fails, before the other ranks end. Without a connection to the store,
            ranks cannot agree on the first one, and each of them calls it.
    """

    def __init__(self, ranks: Ranks, store: Store, describe: Describe) -> None:
        super().__init__()
        self.code = 0
        self._ranks, self._store, self._describe = ranks, store, describe
        self._told = False
        self._ended = threading.Event()
        self._main = threading.get_ident()
        # a store that no longer answers must not hold up the end of this rank for `rendezvous.START`
        store.set_timeout(timedelta(seconds=GRACE_S))
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        """Stop watching. After an error, rank 0 first waits for the others, because it may host the store."""
        if kind is not None and self._ranks.leader:
            self._wait_for_states()
            time.sleep(LOOK_S)  # wait until they no longer use the store
        self._over.set()
        self._thread.join(LOOK_S)

    @contextmanager
    def started(self) -> Iterator[None]:
        """Do nothing: `__enter__` has started the watchdog."""
        yield

    @contextmanager
    def telling(self) -> Iterator[None]:
        """On an error, end all ranks. Print the error if this rank is the first that failed."""
        try:
            yield
        except BaseException as error:
            # `met` and `run` both enter this context for one error
            if not self._told:
                self._told = True
                self._tell(error)
            raise

    def leave(self, code: int) -> NoReturn:
        """Exit with `code`, whose reason has already been reported, and make the other ranks exit too."""
        self._told = True
        self.end(code)
        raise SystemExit(self.code)

    def leave_if_ended(self) -> None:
        """Raise SystemExit if a rank has exited."""
        if self._ended.is_set():
            self._told = True
            raise SystemExit(self.code)

    def _tell(self, error: BaseException) -> None:
        if is_of_another_rank(error):
            # the rank that failed is about to print the error itself
            self._ended.wait(GRACE_S)
        if self._ended.is_set():  # another rank failed first, which may be the reason for this error
            return
        failure = self._classified(error)
        text, self.code = self._describe(failure)
        with suppress(Exception):  # the store is gone
            if self.end(self.code) != self._ranks.rank:
                # still answer the first rank, which may be waiting for all states to find a killed rank
                self._report_state()
                return
            # a launcher that finds a killed rank sends SIGTERM to the others: then the loss is the news, not the signal
            if isinstance(error, KeyboardInterrupt) and (lost := self._missing()):
                text, self.code = self._describe(failure := self._loss_of(lost))
                self._store.set(ENDED, self._claim(self.code))
        if "\n" in text.rstrip():
            where = "" if self._failed_in is None else f", in {self._failed_in.describe()}"
            text = f"rank {self._ranks.rank} of {self._ranks.size} failed first{where}\n{text}"
        sys.stderr.write(f"{text.rstrip()}\n")
        sys.stderr.flush()
        self._recorded(failure, self.code)

    def _missing(self) -> list[int]:
        """Return the ranks that do not report their state, although the store tells them that the run ends.

        A launcher sends SIGTERM to the ranks that are left when it finds that one was killed.
        """
        self._report_state()
        self._wait_for_states()
        return [rank for rank, key in enumerate(self._states()) if not self._store.check([key])]

    def _loss_of(self, ranks: list[int]) -> TransientError:
        names = ", ".join(map(str, ranks))
        return TransientError(
            f"rank {names} of {self._ranks.size} was killed, or its machine failed. Restart the run with resume=auto."
        )

    def _where(self) -> str:
        """Return the operation that failed, without its data, for a message in one line."""
        return f", in {self._failed_in.what}" if self._failed_in is not None else ""

    def _classified(self, error: BaseException) -> BaseException:
        """Return a `TransientError` for an error of torch that another rank caused, and any other error unchanged."""
        if not isinstance(error, RuntimeError) or is_of_another_rank(error):
            return error
        own = f"rank {self._ranks.rank} of {self._ranks.size}"
        if LOST.search(str(error)):
            message = f"{own} lost another rank, which was killed or whose machine failed{self._where()}."
        elif LATE.search(str(error)):
            message = f"{own} waited too long for another rank{self._where()} ({str(error).splitlines()[0]})."
        else:
            return error
        lost_rank = TransientError(f"{message} Restart the run with resume=auto.")
        lost_rank.__cause__ = error
        return lost_rank

    def end(self, code: int) -> int:
        """Claim to be the first rank that exits. Return the rank that was first, and adopt its exit code."""
        # an expected value of "" writes only if the key does not exist; the answer is what is there now
        ended: dict[str, Any] = json.loads(self._store.compare_set(ENDED, "", self._claim(code)))
        self.code = ended["code"]
        return int(ended["rank"])

    def _claim(self, code: int) -> str:
        return json.dumps({"rank": self._ranks.rank, "code": code})

    def _watch(self) -> None:
        gone = ""
        try:
            while not self._store.check([ENDED]):
                if (operation := self.exceeded()) is not None:
                    self._hang(operation)
                    break
                self.report_slow()
                if self._over.wait(LOOK_S):
                    return
            self.end(ExitCode.transient)
            self._ended.set()
            self._report_state()
        except Exception as error:  # the process that hosts the store is gone: the launcher of all ranks
            first = str(error).partition("\n")[0]
            gone = f"rank {self._ranks.rank} lost the launcher ({first}). Restart the run with resume=auto."
            self.code = self.code or ExitCode.transient
        if self._over.wait(GRACE_S):
            return
        if gone:
            self._recorded(TransientError(gone), self.code)
            write_stderr(f"error: {gone}\n")
        os._exit(self.code)

    def _states(self) -> list[str]:
        """Return the keys of the store under which the ranks report their state."""
        return [f"doing/{rank}" for rank in range(self._ranks.size)]

    def _report_state(self) -> None:
        self._store.set(self._states()[self._ranks.rank], self._state())

    def _wait_for_states(self) -> None:
        """Wait until the other ranks have reported their state. Poll, because the store can wait for one key only."""
        until = time.monotonic() + ANSWER_S
        others = [key for rank, key in enumerate(self._states()) if rank != self._ranks.rank]
        with suppress(Exception):
            while not self._store.check(others) and time.monotonic() < until:
                time.sleep(0.1)

    def _state(self) -> str:
        """Return the current operation of this rank and the code location of its main thread."""
        doing = next(reversed(self.operations()), self._failed_in)
        frame = sys._current_frames().get(self._main)
        where = f" in {frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})" if frame else ""
        return f"between two calls{where}" if doing is None else doing.describe(where)

    def _hang(self, operation: Operation) -> None:
        """End all ranks, and print the current operation of each rank."""
        if self.end(ExitCode.transient) != self._ranks.rank:
            return
        limit = f"{operation.what} exceeds runtime.rpc_timeout_minutes={self.limit_s / 60:g}."
        self._recorded(TransientError(f"{limit} Restart the run with resume=auto."), ExitCode.transient)
        keys = self._states()
        self._report_state()
        self._wait_for_states()
        states = [self._store.get(key).decode() if self._store.check([key]) else "no answer" for key in keys]
        lines = [f"rank {rank}: {state}" for rank, state in enumerate(states)]
        write_stderr("\n".join([f"error: {limit} The run ends.", *lines, ""]))

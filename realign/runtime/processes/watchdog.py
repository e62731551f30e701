"""Watch the calls of a run: end a run whose call takes too long, and all ranks once one of them fails.

In distributed training, a rank that raises notifies the others through the launcher's store, because they may be
blocked in a collective. All ranks exit with the code of the first one that failed, and only that one prints the cause.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias

from realign.console import write_stderr
from realign.errors import ExitCode, TransientError
from realign.ranks import Ranks, is_of_another_rank
from realign.runtime.runtime_spec import RuntimeSpec
from realign.signals import raise_in_main_thread

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_WORKERS_FIRST_S = 60.0
"""Seconds that a call with runtime=ray may exceed its limit, since the report of the worker group names the rank."""
POLL_S = 0.5
"""Seconds between two looks of a rank into the store."""
GRACE_S = 10.0
"""Seconds in which a run ends by itself after a call took too long, or another rank failed. Then the process exits."""
ANSWER_S = 3.0
"""Seconds to wait for signs of life of all ranks."""
ENDED = "ended"
"""Key of the store: the first rank that exited, and its exit code."""
LOST = re.compile(r"Connection (closed|reset) by peer|[Rr]emote process exited")
"""Matches the errors of gloo and NCCL for a lost rank."""
_LATE = re.compile(
    r"Timed out waiting \d+ ?ms|Timed out after \d+ seconds|[Ww]ait timeout|Socket Timeout|collective operation timeout"
)
"""Matches the errors of torch for a rank that did not join a collective in time."""

Record: TypeAlias = Callable[[BaseException, int], None]
"""Records a failure that ends the run: the error, and the exit code of the process."""
Describe: TypeAlias = Callable[[BaseException], tuple[str, int]]
"""Returns the message of an error for the user, and the exit code of the process."""

logger = logging.getLogger(__name__)


class WorkerLost(TransientError):
    """A worker process died: killed, out of memory, or its machine failed. The run continues from a checkpoint."""


class WorkerHangs(TransientError):
    """A worker process did not complete a call of the graph within the time limit."""


class CallTimeout(KeyboardInterrupt):
    """A call of the graph exceeded its time limit in a single-process run.

    It is a KeyboardInterrupt, so that no `except Exception` of the code that hangs suppresses it.

    Attributes:
        exit_code: Exit code of the process, since a restart with `resume=auto` can fix a hang.
    """

    exit_code = int(ExitCode.transient)


# compared by identity: operations are keys, and their data need not be hashable
@dataclass(frozen=True, eq=False)
class Operation:
    """An operation in progress, such as a call of the graph."""

    what: str
    """Name for messages."""
    data: object
    """Input of the operation; None if there is none."""
    since: float
    """Start time on the monotonic clock, in seconds."""

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.since

    def describe(self) -> str:
        """Return a human-readable description."""
        return f"{self.what} for {self.seconds:.0f} s" + ("" if self.data is None else f" on {self.data!r}")


def _record_nothing(error: BaseException, code: int) -> None:
    """Record nothing: the caller of the run did not ask for a record."""


class Watch:
    """Tracks the current operations of this process, and acts on calls that take too long.

    Args:
        minutes: Time limit of a call of the graph.
        ends: Whether a call that exceeds the limit ends the run with exit code 75. Otherwise it is a warning.
        extra_s: Seconds after the limit at which it is enforced.

    Attributes:
        record: Called before the watch terminates the process, which then has no other chance to record the failure.
    """

    def __init__(self, minutes: float = math.inf, *, ends: bool = True, extra_s: float = 0.0) -> None:
        self.minutes, self.ends, self.extra_s = minutes, ends, extra_s
        self.record: Record = _record_nothing
        # an ordered set; its single operations are atomic, so that other threads need no lock
        self._operations: dict[Operation, None] = {}
        self._failed_in: Operation | None = None

    @contextmanager
    def doing(self, what: str, data: object = None, *, limited: bool = False) -> Iterator[None]:
        """Mark the context as operation `what` on `data`; `limited` applies the time limit."""
        operation = Operation(what, data, time.monotonic())
        timer = threading.Timer(60 * self.minutes + self.extra_s, self._exceed, [operation])
        timer.daemon = True
        if limited and self.minutes < math.inf:
            timer.start()
        self._operations[operation] = None
        try:
            yield
        except BaseException:
            # the innermost operation sees the error first, and is the one to name
            self._failed_in = self._failed_in or operation
            raise
        finally:
            timer.cancel()
            del self._operations[operation]

    @contextmanager
    def report_errors(self) -> Iterator[None]:
        """Report errors that leave this context to the other processes of the run."""
        yield

    def operations(self) -> list[Operation]:
        """Return the operations in progress, in the order of their start; callable from any thread."""
        return list(self._operations)

    def _exceed(self, operation: Operation) -> None:
        """End the run, whose main thread then writes a checkpoint, or warn."""
        if not self.ends:
            logger.warning(
                "%s has not finished after %g minutes. The run continues. Set runtime.rpc_timeout_minutes to end a run "
                "whose calls hang.",
                operation.what,
                self.minutes,
            )
            return
        error = CallTimeout(self._timeout_of(operation))
        raise_in_main_thread(error)
        time.sleep(GRACE_S)
        if operation in self._operations:
            self._exit(error, ExitCode.transient)

    def _timeout_of(self, operation: Operation) -> str:
        limit = f"runtime.rpc_timeout_minutes={self.minutes:g}"
        return f"{operation.what} exceeded {limit}. Restart the run with resume=auto."

    def _exit(self, error: BaseException, code: int) -> NoReturn:
        """Report an error and terminate this process, whose main thread does not end."""
        write_stderr(f"error: {error}\n")  # not the log, since the thread that hangs may hold its lock
        try:
            self.record(error, code)
        finally:
            # `sys.exit` would end this thread only, and a normal exit could wait for the thread that hangs
            os._exit(code)


def watch_for(runtime: RuntimeSpec) -> Watch:
    """Return the watch of a run without torchrun. It ends the run only if a time limit is set."""
    ends = runtime.rpc_timeout_minutes is not None
    return Watch(runtime.call_minutes, ends=ends, extra_s=_WORKERS_FIRST_S if runtime.starts_workers else 0.0)


class RankWatch(Watch):
    """The watch of one rank in distributed training; it starts with `__enter__`.

    Args:
        ranks: This rank and the number of ranks.
        store: Store that all ranks share. The watch needs a separate connection, because its thread polls the store.
        describe: See `Describe`.

    Attributes:
        code: Exit code of this process, set when a rank fails.
        record: Called on the first rank that fails, before the other ranks end. Without a connection to the store,
            ranks cannot agree on the first one, and each of them calls it.
    """

    def __init__(self, ranks: Ranks, store: Store, describe: Describe) -> None:
        super().__init__()
        self.code = 0
        self._ranks, self._store, self._describe = ranks, store, describe
        self._reported = False
        self._over, self._ended = threading.Event(), threading.Event()
        # a store that no longer answers must not hold up the end of this rank for `rendezvous.START`
        store.set_timeout(timedelta(seconds=GRACE_S))
        self._thread = threading.Thread(target=self._poll, name="watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        """Stop watching. After an error, rank 0 first waits for the others, because it may host the store."""
        if kind is not None and self._ranks.leader:
            with suppress(Exception):  # the store is gone
                self._silent_ranks()
            time.sleep(POLL_S)  # wait until they no longer use the store
        self._over.set()
        self._thread.join(POLL_S)

    @contextmanager
    def report_errors(self) -> Iterator[None]:
        """On an error, end all ranks. Print the error if this rank is the first that failed."""
        try:
            yield
        except BaseException as error:
            # `connect` and `run` both enter this context for one error
            if not self._reported:
                self._reported = True
                self._report(error)
            raise

    def exit_all(self, code: int) -> NoReturn:
        """Exit with `code`, whose reason has already been reported, and make the other ranks exit too."""
        self._reported = True
        self._claim_end(code)
        raise SystemExit(self.code)

    def exit_if_ended(self) -> None:
        """Raise SystemExit if a rank has exited."""
        if self._ended.is_set():
            self._reported = True
            raise SystemExit(self.code)

    def _report(self, error: BaseException) -> None:
        if is_of_another_rank(error):
            # the rank that failed is about to print the error itself
            self._ended.wait(GRACE_S)
        if self._ended.is_set():  # another rank failed first, which may be the reason for this error
            return
        failure = self._classify(error)
        text, self.code = self._describe(failure)
        with suppress(Exception):  # the store is gone
            if self._claim_end(self.code) != self._ranks.rank:
                self._answer()
                return
            # a launcher that finds a killed rank sends SIGTERM to the others: then the loss is the news, not the signal
            if isinstance(error, KeyboardInterrupt) and (silent := self._silent_ranks()):
                failure = TransientError(
                    f"rank {', '.join(map(str, silent))} of {self._ranks.size} was killed, or its machine failed. "
                    "Restart the run with resume=auto."
                )
                text, self.code = self._describe(failure)
                self._store.set(ENDED, self._claim(self.code))
        if "\n" in text.rstrip():
            where = "" if self._failed_in is None else f", in {self._failed_in.describe()}"
            text = f"rank {self._ranks.rank} of {self._ranks.size} failed first{where}\n{text}"
        sys.stderr.write(f"{text.rstrip()}\n")
        sys.stderr.flush()
        self.record(failure, self.code)

    def _classify(self, error: BaseException) -> BaseException:
        """Return a `TransientError` for an error of torch that another rank caused, and any other error unchanged."""
        if not isinstance(error, RuntimeError) or is_of_another_rank(error):
            return error
        where = f", in {self._failed_in.what}" if self._failed_in is not None else ""
        if LOST.search(str(error)):
            message = f"lost another rank, which was killed or whose machine failed{where}."
        elif _LATE.search(str(error)):
            message = f"waited too long for another rank{where} ({str(error).splitlines()[0]})."
        else:
            return error
        own = f"rank {self._ranks.rank} of {self._ranks.size}"
        lost_rank = TransientError(f"{own} {message} Restart the run with resume=auto.")
        lost_rank.__cause__ = error
        return lost_rank

    def _exceed(self, operation: Operation) -> None:
        """Let `_poll` end all ranks, whose main threads may be blocked in a collective."""
        with suppress(Exception):  # the store is gone, which `_poll` reports
            if self._claim_end(ExitCode.transient) == self._ranks.rank:
                error = TransientError(f"rank {self._ranks.rank} of {self._ranks.size}: {self._timeout_of(operation)}")
                write_stderr(f"error: {error}\n")
                self.record(error, self.code)

    def _claim_end(self, code: int) -> int:
        """Claim to be the first rank that exits. Return the rank that was first, and adopt its exit code."""
        # an expected value of "" writes only if the key does not exist; the answer is what is there now
        ended: dict[str, Any] = json.loads(self._store.compare_set(ENDED, "", self._claim(code)))
        self.code = ended["code"]
        return int(ended["rank"])

    def _claim(self, code: int) -> str:
        return json.dumps({"rank": self._ranks.rank, "code": code})

    def _poll(self) -> None:
        """Wait until a rank has exited or the store is gone, and terminate this process if it does not end then."""
        gone = ""
        try:
            while not self._store.check([ENDED]):
                if self._over.wait(POLL_S):
                    return
            self._claim_end(ExitCode.transient)
            self._ended.set()
            self._answer()
        except Exception as error:  # the process that hosts the store is gone: the launcher of all ranks
            first = str(error).partition("\n")[0]
            gone = f"rank {self._ranks.rank} lost the launcher ({first}). Restart the run with resume=auto."
            self.code = self.code or ExitCode.transient
        if self._over.wait(GRACE_S):
            return
        if gone:
            self._exit(TransientError(gone), self.code)
        os._exit(self.code)

    def _answer(self) -> None:
        """Tell the other ranks that this one knows of the end, and is alive."""
        self._store.set(f"alive/{self._ranks.rank}", "")

    def _silent_ranks(self) -> list[int]:
        """Return the ranks that do not answer, although the store tells them that the run ends."""
        until = time.monotonic() + ANSWER_S
        silent = [rank for rank in range(self._ranks.size) if rank != self._ranks.rank]
        # polls, because the store can wait for one key only
        while silent := [rank for rank in silent if not self._store.check([f"alive/{rank}"])]:
            if time.monotonic() > until:
                break
            time.sleep(0.1)
        return silent

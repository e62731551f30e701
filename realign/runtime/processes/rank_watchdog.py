"""Watchdog of distributed training: if one rank fails, hangs or is stopped, all ranks exit and one reports the cause.

A rank that raises notifies the others through the launcher's store, because they may be blocked in a collective. A
thread of each rank polls the store and checks the duration of the current call.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias

from realign.engines.distributed.ranks import Ranks, is_of_another_rank
from realign.errors import ExitCode, TransientError
from realign.runtime.processes.watchdog import Operation, Watchdog

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

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
LOOK_S = 0.5
"""Polling interval of the thread, in seconds."""
GRACE_S = 10.0
"""Seconds that a rank has to exit after the first rank exited. After that, the thread terminates the process."""
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
            self._ended.wait(GRACE_S)
        if self._ended.is_set():  # another rank failed first, which may be the reason for this error
            return
        failure = self._classified(error)
        text, self.code = self._describe(failure)
        with suppress(Exception):  # the store is gone
            if self.end(self.code) != self._ranks.rank:
                self._report_state()
                return
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
            os.write(2, f"error: {gone}\n".encode())
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
        os.write(2, "\n".join([f"error: {limit} The run ends.", *lines, ""]).encode())

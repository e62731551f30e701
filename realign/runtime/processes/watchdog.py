"""Watchdog of distributed training: if one rank fails, hangs or is stopped, all ranks exit and one reports the cause.

A rank that raises notifies the others through the launcher's store, because they may be blocked in a collective. A
thread of each rank polls the store and checks the duration of the current call.
"""

from __future__ import annotations

import json
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

from realign.engines.distributed.ranks import Ranks, is_of_another_rank

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

Describe: TypeAlias = Callable[[BaseException], tuple[str, int]]
"""Returns the message of an error for the user, and the exit code of the process."""

ENDED = "ended"
"""Key of the store: the first rank that exited, and its exit code."""
LOST = re.compile(r"Connection (closed|reset) by peer|[Rr]emote process exited")
"""Matches the errors of gloo and NCCL for a lost rank."""
LOOK_S = 0.5
"""Polling interval of the thread, in seconds."""
GRACE_S = 10.0
"""Seconds that a rank has to exit after the first rank exited. After that, the thread terminates the process."""
ANSWER_S = 3.0
"""Seconds to wait for the state reports of all ranks when one hangs."""


class Watch:
    """Tracks the current operation of this rank. This base class does nothing; single-process runs use it."""

    @contextmanager
    def doing(self, what: str, data: object = None, *, limited: bool = False) -> Iterator[None]:
        """Mark the context as operation `what` on `data`; `limited` applies the time limit."""
        yield

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Report errors that leave this context to the other ranks."""
        yield


@dataclass(frozen=True)
class _Doing:
    what: str
    data: object
    limited: bool
    since: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def describe(self, where: str = "") -> str:
        """Return a human-readable description; `where` is a location in the code."""
        return f"{self.what} for {self.seconds:.0f} s{where}" + ("" if self.data is None else f" on {self.data!r}")


class RankWatch(Watch):
    """The watchdog of one rank in distributed training; it starts with `__enter__`.

    Args:
        ranks: This rank and the number of ranks.
        store: Store that all ranks share. The watchdog needs a separate connection, because its thread polls the store.
        describe: See `Describe`.

    Attributes:
        code: Exit code of this process, set when a rank fails.
        limit_s: Time limit of a limited operation, in seconds.
    """

    def __init__(self, ranks: Ranks, store: Store, describe: Describe) -> None:
        self.code = 0
        self.limit_s = math.inf
        self._ranks, self._store, self._describe = ranks, store, describe
        self._doing: _Doing | None = None
        self._failed_in: _Doing | None = None
        self._told = False
        self._over, self._ended = threading.Event(), threading.Event()
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
    def doing(self, what: str, data: object = None, *, limited: bool = False) -> Iterator[None]:
        """Mark the context as operation `what` on `data`. If `limited`, end all ranks after `limit_s` seconds."""
        before, self._doing = self._doing, _Doing(what, data, limited, time.monotonic())
        try:
            yield
        except BaseException:
            self._failed_in = self._failed_in or self._doing
            raise
        finally:
            self._doing = before

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
        text, self.code = self._describe(error)
        first = self._ranks.rank
        with suppress(Exception):  # the store is gone
            if is_of_another_rank(error):
                self._ended.wait(GRACE_S)
            first = self.end(self.code)
        if first != self._ranks.rank:
            return
        if "\n" in text.rstrip():
            where = f", in {self._failed_in.describe()}" if self._failed_in is not None else ""
            how = "lost another one, which was killed or whose machine is gone" if LOST.search(text) else "failed first"
            text = f"rank {first} of {self._ranks.size} {how}{where}\n{text}"
        sys.stderr.write(f"{text.rstrip()}\n")
        sys.stderr.flush()

    def end(self, code: int) -> int:
        """Claim to be the first rank that exits. Return the rank that was first, and adopt its exit code."""
        mine = json.dumps({"rank": self._ranks.rank, "code": code})
        ended: dict[str, Any] = json.loads(self._store.compare_set(ENDED, "", mine))
        self.code = ended["code"]
        return int(ended["rank"])

    def _watch(self) -> None:
        gone = ""
        try:
            while not self._store.check([ENDED]):
                if (doing := self._doing) is not None and doing.limited and doing.seconds > self.limit_s:
                    self._hang(doing)
                    break
                if self._over.wait(LOOK_S):
                    return
            self.end(1)
            self._ended.set()
            self._store.set(self._states()[self._ranks.rank], self._state())
        except Exception as error:  # the process that hosts the store is gone: the launcher of all ranks
            gone = f"rank {self._ranks.rank}: the launcher is gone ({error}); it ends, too\n"
        if self._over.wait(GRACE_S):
            return
        os.write(2, gone.encode())
        os._exit(self.code or 1)

    def _states(self) -> list[str]:
        """Return the keys of the store under which the ranks report their state."""
        return [f"doing/{rank}" for rank in range(self._ranks.size)]

    def _wait_for_states(self) -> None:
        """Wait until the other ranks have reported their state. Poll, because the store can wait for one key only."""
        until = time.monotonic() + ANSWER_S
        others = [key for rank, key in enumerate(self._states()) if rank != self._ranks.rank]
        with suppress(Exception):
            while not self._store.check(others) and time.monotonic() < until:
                time.sleep(0.1)

    def _state(self) -> str:
        """Return the current operation of this rank and the code location of its main thread."""
        doing = self._doing or self._failed_in
        frame = sys._current_frames().get(self._main)
        where = f" in {frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})" if frame else ""
        return f"between two calls{where}" if doing is None else doing.describe(where)

    def _hang(self, doing: _Doing) -> None:
        """End all ranks, and print the current operation of each rank."""
        if self.end(1) != self._ranks.rank:
            return
        keys = self._states()
        self._store.set(keys[self._ranks.rank], self._state())
        self._wait_for_states()
        states = [self._store.get(key).decode() if self._store.check([key]) else "no answer" for key in keys]
        lines = [f"rank {rank}: {state}" for rank, state in enumerate(states)]
        head = f"error: {doing.what} takes longer than runtime.rpc_timeout_minutes={self.limit_s / 60:g}"
        os.write(2, "\n".join([head, *lines, ""]).encode())

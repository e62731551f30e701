"""`Watch`: one rank among others that fails, hangs or is stopped ends all of them, and says why, once.

A rank that raises tells the others through the launcher's store, since they may be waiting for it in a collective from
which nothing else would wake them. A thread of each rank looks at the store, and at how long the call under way takes.
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
"""The text of an error for people, and the exit code of a process that ends by it."""

ENDED = "ended"
"""Key of the store: which rank was the first to end, and with which exit code."""
LOST = re.compile(r"Connection (closed|reset) by peer|[Rr]emote process exited")
"""What gloo and NCCL say of a rank that is not there any more."""
LOOK_S = 0.5
"""Seconds between two looks of the thread."""
GRACE_S = 10.0
"""Seconds that a rank has to end by itself once one has; then it is ended, whatever it waits for."""
ANSWER_S = 3.0
"""Seconds that ranks have to say what they are doing when one hangs."""


class Watch:
    """Knows what this process is doing. Where it makes a run alone, as here, nobody needs to be told."""

    @contextmanager
    def doing(self, what: str, data: object = None, *, limited: bool = False) -> Iterator[None]:
        """Inside this context the process does `what` on `data`, for a limited time."""
        yield

    @contextmanager
    def telling(self) -> Iterator[None]:
        """An error that leaves this context is told to the other ranks."""
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
        """For people; `where`: a place in the code."""
        return f"{self.what} for {self.seconds:.0f} s{where}" + ("" if self.data is None else f" on {self.data!r}")


class RankWatch(Watch):
    """The watch of one of several ranks, from `__enter__` on.

    Args:
        ranks: this one among all.
        store: what they share; a connection of the watch's own, since its thread asks it at any time.
        describe: see `Describe`.

    Attributes:
        code: exit code of this process, once a rank has ended by an error.
        limit_s: seconds that what is limited may take.
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
        """Stop watching, once every other rank knows of an error; rank 0 may hold the store, which ends with it."""
        if kind is not None and self._ranks.leader:
            self._wait_for_states()
            time.sleep(LOOK_S)  # until they have left the store alone
        self._over.set()
        self._thread.join(LOOK_S)

    @contextmanager
    def doing(self, what: str, data: object = None, *, limited: bool = False) -> Iterator[None]:
        """Inside this context the process does `what` on `data`; it ends if that is limited, and takes too long."""
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
        """An error that leaves this context is shown, if it is the first of all ranks, and ends the others."""
        try:
            yield
        except BaseException as error:
            if not self._told:
                self._told = True
                self._tell(error)
            raise

    def leave(self, code: int) -> NoReturn:
        """End by an exit code, of which has been told, and with this rank the others."""
        self._told = True
        self.end(code)
        raise SystemExit(self.code)

    def leave_if_ended(self) -> None:
        """Raise SystemExit once a rank has ended."""
        if self._ended.is_set():
            self._told = True
            raise SystemExit(self.code)

    def _tell(self, error: BaseException) -> None:
        text, self.code = self._describe(error)
        first = self._ranks.rank
        with suppress(Exception):  # the store is gone: there is nobody left to tell
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
        """Be the first that ends, with this exit code, unless another one was; its rank, whose code is taken over."""
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
        except Exception as error:  # the process that holds the store is gone, which is the launcher of all ranks
            gone = f"rank {self._ranks.rank}: the launcher is gone ({error}); it ends, too\n"
        if self._over.wait(GRACE_S):
            return
        os.write(2, gone.encode())
        os._exit(self.code or 1)

    def _states(self) -> list[str]:
        """Keys under which the ranks say what they are doing."""
        return [f"doing/{rank}" for rank in range(self._ranks.size)]

    def _wait_for_states(self) -> None:
        """Until the others have said what they are doing; asks again and again, since the store waits for one only."""
        until = time.monotonic() + ANSWER_S
        others = [key for rank, key in enumerate(self._states()) if rank != self._ranks.rank]
        with suppress(Exception):
            while not self._store.check(others) and time.monotonic() < until:
                time.sleep(0.1)

    def _state(self) -> str:
        """What this rank is doing, and where its main thread stands."""
        doing = self._doing or self._failed_in
        frame = sys._current_frames().get(self._main)
        where = f" in {frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})" if frame else ""
        return f"between two calls{where}" if doing is None else doing.describe(where)

    def _hang(self, doing: _Doing) -> None:
        """End all ranks, and show what each is doing."""
        if self.end(1) != self._ranks.rank:
            return
        keys = self._states()
        self._store.set(keys[self._ranks.rank], self._state())
        self._wait_for_states()
        states = [self._store.get(key).decode() if self._store.check([key]) else "no answer" for key in keys]
        lines = [f"rank {rank}: {state}" for rank, state in enumerate(states)]
        head = f"error: {doing.what} takes longer than runtime.rpc_timeout_minutes={self.limit_s / 60:g}"
        os.write(2, "\n".join([head, *lines, ""]).encode())

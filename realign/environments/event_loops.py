"""`LoopThread`: an event loop in a daemon thread. The caller abandons the loop when a call blocks it."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import dropwhile
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar

from realign.errors import RewardError
from realign.text import log_file, visible

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Calls: TypeAlias = "SimpleQueue[Callable[[], None] | None]"

IDLE_S = 5.0
"""Seconds after which an idle thread of `DaemonThreads` ends."""
LOOK_S = 0.5
"""Seconds between two checks that a loop runs callbacks."""
SHUT_S = 1.0
"""Seconds that canceled tasks have to end while their loop is being closed."""
MOST_BLOCKED = 16
"""Blocked threads of one environment above which the run stops. Each keeps its memory until its call returns."""

_MACHINERY = {Path(asyncio.__file__).parent, Path(threading.__file__), Path(__file__).parent}


class EnvironmentFailure(RewardError):
    """Raised when environments fail too often for the run to continue."""


class LoopBlocked(RuntimeError):
    """A call blocks the thread of an event loop.

    Attributes:
        stack: stack trace of the thread.
    """

    def __init__(self, stack: str) -> None:
        super().__init__("a call blocks the event loop")
        self.stack = stack


class LoopThread:
    """An event loop that runs in a daemon thread until `close` or `abandon`.

    Args:
        patience_s: seconds without progress after which the loop counts as blocked.
    """

    def __init__(self, patience_s: float) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(DaemonThreads())
        self._patience_s = patience_s
        self._look_s = min(LOOK_S, patience_s / 4)
        self._pulses = 0
        self._abandoned = False
        self._tasks: set[asyncio.Task[None]] = set()  # strong references: a loop keeps only weak ones
        self._ending: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._work, name="environments", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread is running, busy or blocked."""
        return self._thread.is_alive()

    def pulse(self) -> None:
        """Signal that the loop is not blocked. Every call does so before it begins.

        Raises:
            CancelledError: the loop was abandoned, so no further call may begin.
        """
        if self._abandoned:
            raise asyncio.CancelledError("the event loop was abandoned")
        self._pulses += 1

    def run(self, work: Callable[[], Coroutine[Any, Any, T]], most_s: float = math.inf) -> T:
        """Run a coroutine on the loop and return its result. A signal interrupts the wait and cancels all tasks.

        Args:
            work: creates the coroutine.
            most_s: maximum wait in seconds.

        Raises:
            LoopBlocked: the loop made no progress for `patience_s` and was abandoned.
            TimeoutError: there is no result after `most_s` seconds.
        """
        future: Future[T] = Future()

        async def working() -> None:
            try:
                future.set_result(await work())
            except BaseException as error:
                future.set_exception(error)

        self._post(lambda: self._start(working()))
        silent_s = waited_s = 0.0  # sums of checks, not clock time: suspending the process must not count
        try:
            while not future.done():
                before = self._pulses
                # A loop that a call blocks does not run this, so the count of pulses stays the same.
                self._post(self._beat)
                wait((future,), self._look_s)
                waited_s += self._look_s
                silent_s = 0.0 if self._pulses != before else silent_s + self._look_s
                if silent_s > self._patience_s and not future.done():
                    raise LoopBlocked(self.abandon())
                if waited_s >= most_s and not future.done():
                    raise TimeoutError(f"no result within {most_s:g} s")
        except BaseException:  # for example from a signal handler
            self._post(self._cancel)
            raise
        return future.result()

    def abandon(self) -> str:
        """Abandon the loop, which then ends by itself once it is no longer blocked. Returns the stack of its thread."""
        self._abandoned = True
        frame = sys._current_frames().get(self._thread.ident or 0)
        self._post(self._begin_end)
        if frame is None:
            return "  (the thread has ended)"
        stack = traceback.extract_stack(frame)
        calls = list(dropwhile(lambda call: not _MACHINERY.isdisjoint(_places(call.filename)), stack))
        return visible("".join(traceback.format_list(calls or stack)).rstrip())

    def close(self, within_s: float) -> bool:
        """Cancel all tasks and end the thread. Returns whether the thread ended within `within_s` seconds."""
        self._post(self._begin_end)
        self._thread.join(within_s)
        return not self.alive

    def _work(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            while self._ending is None or not self._ending.done():  # an environment may call `stop` too
                with suppress(SystemExit, KeyboardInterrupt):  # raised in a task that an environment started
                    self.loop.run_forever()
        finally:
            self.loop.close()

    def _post(self, callback: Callable[[], object]) -> None:
        try:
            self.loop.call_soon_threadsafe(callback)
        except RuntimeError:
            logger.debug("an event loop of environments has ended")

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _beat(self) -> None:
        self._pulses += 1

    def _cancel(self) -> set[asyncio.Task[Any]]:
        others = asyncio.all_tasks(self.loop) - {self._ending}
        for task in others:
            task.cancel()
        return others

    def _begin_end(self) -> None:
        if self._ending is None:
            self._ending = self.loop.create_task(self._end())
            self._ending.add_done_callback(lambda _: self.loop.stop())

    async def _end(self) -> None:
        """Cancel all tasks and wait for them, for a limited time."""
        self.loop.set_exception_handler(lambda _, context: logger.debug("left behind: %s", context["message"]))
        if others := self._cancel():
            await asyncio.wait(others, timeout=SHUT_S)
        await asyncio.wait({asyncio.ensure_future(self.loop.shutdown_asyncgens())}, timeout=SHUT_S)


class BlockedLoops:
    """Counts the abandoned loops of one environment. Logs the first one, and stops the run if there are too many."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[LoopThread] = []
        self._logged = False

    def add(self, environment: str, patience_s: float, thread: LoopThread, stack: str) -> None:
        """Count an abandoned loop.

        Raises:
            EnvironmentFailure: more than `MOST_BLOCKED` threads are currently blocked.
        """
        with self._lock:
            self._threads = [other for other in self._threads if other.alive] + [thread]
            first, self._logged, blocked = not self._logged, True, len(self._threads)
        if first:
            logger.warning(
                "environment %s blocked its event loop for more than %g s (timeout_s plus a grace period), so the "
                "loop was abandoned. Its unfinished episodes get no reward; the run continues. Use `def` instead of "
                "`async def` for code that blocks, such as time.sleep, requests or subprocess.run. Later cases are "
                "counted, not logged. The thread executes:\n%s",
                environment,
                patience_s,
                stack,
            )
        if blocked > MOST_BLOCKED:
            raise EnvironmentFailure(
                f"environment {environment}: {blocked} threads are blocked by calls that do not return. Use `def` "
                "instead of `async def` for code that blocks, and set timeouts in it (stack of the first one: see "
                f"{log_file(logger)})."
            )


class DaemonThreads(ThreadPoolExecutor):
    """Executor whose threads neither a batch nor the process waits for. Any number of calls run at a time.

    A call reuses an idle thread if there is one. Starting a thread blocks the caller, which is an event loop, until the
    new thread runs. On a busy machine this takes milliseconds.
    """

    def __init__(self) -> None:
        # asyncio accepts no other class as default executor. The threads of the base class never start.
        super().__init__()
        self._guard = threading.Lock()  # guards the attributes below
        self._idle: list[_Calls] = []
        self._ended = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run a call in a daemon thread."""
        future: Future[T] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)

        with self._guard:
            calls = self._idle.pop() if self._idle else None
        if calls is None:
            calls = SimpleQueue()
            threading.Thread(target=self._serve, args=(calls,), daemon=True).start()
        calls.put(work)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the idle threads. Other threads end after their calls."""
        with self._guard:
            self._ended, idle, self._idle = True, self._idle, []
        for calls in idle:
            calls.put(None)

    def _serve(self, calls: _Calls) -> None:
        """Run the calls of a thread."""
        while (work := self._next(calls)) is not None:
            work()
            del work  # an idle thread must not keep results alive
            with self._guard:
                if self._ended:
                    return
                self._idle.append(calls)

    def _next(self, calls: _Calls) -> Callable[[], None] | None:
        """Wait for the next call. Returns None if the thread ends."""
        with suppress(Empty):
            return calls.get(timeout=IDLE_S)
        with self._guard:
            if calls in self._idle:
                self._idle.remove(calls)
                return None
        return calls.get()  # another thread has just chosen this one


def _places(filename: str) -> set[Path]:
    """Return a file and its folder."""
    return {Path(filename), Path(filename).parent}

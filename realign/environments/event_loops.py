"""`LoopThread`: an event loop in a daemon thread, which the caller abandons when a call blocks it."""

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
from typing import Any, TypeVar

from realign.environments.failures import EnvironmentFailure
from realign.rewards.text import visible

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S = 0.5
"""Seconds between two checks that a loop still runs callbacks."""
SHUT_S = 1.0
"""Seconds that cancelled tasks have to end when their loop is closed."""
MOST_BLOCKED = 16
"""Blocked threads of one environment above which the run ends; each keeps its memory until its call returns."""

_MACHINERY = {Path(asyncio.__file__).parent, Path(threading.__file__), Path(__file__).parent}


class LoopBlocked(RuntimeError):
    """A call blocks the thread of an event loop.

    Attributes:
        stack: what the thread was doing.
    """

    def __init__(self, stack: str) -> None:
        super().__init__("a call blocks the event loop")
        self.stack = stack


class LoopThread:
    """An event loop that runs in a daemon thread until `close` or `abandon`.

    Args:
        patience_s: seconds without any sign of life after which the loop counts as blocked.
    """

    def __init__(self, patience_s: float) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(DaemonThreads())
        self._patience_s = patience_s
        self._look_s = min(LOOK_S, patience_s / 4)
        self._pulses = 0
        self._abandoned = False
        self._tasks: set[asyncio.Task[None]] = set()  # a loop itself refers to its tasks weakly
        self._ending: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._work, name="environments", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread exists, busy or blocked."""
        return self._thread.is_alive()

    def pulse(self) -> None:
        """Show that the loop is not blocked; each call does so before it begins.

        Raises:
            CancelledError: the loop was abandoned, so no further call may begin.
        """
        if self._abandoned:
            raise asyncio.CancelledError("the event loop was abandoned")
        self._pulses += 1

    def run(self, work: Callable[[], Coroutine[Any, Any, T]], most_s: float = math.inf) -> T:
        """Run a coroutine on the loop and return its result. A signal interrupts the wait and cancels all tasks.

        Args:
            work: makes the coroutine.
            most_s: seconds to wait at most.

        Raises:
            LoopBlocked: the loop gave no sign of life for `patience_s`; it is abandoned.
            TimeoutError: `most_s` are over.
        """
        found: Future[T] = Future()

        async def working() -> None:
            try:
                found.set_result(await work())
            except BaseException as error:
                found.set_exception(error)

        self._post(lambda: self._start(working()))
        silent_s = waited_s = 0.0  # counted in looks, so that a process that was suspended finds no loop blocked
        try:
            while not found.done():
                before = self._pulses
                self._post(self._beat)
                wait((found,), self._look_s)
                waited_s += self._look_s
                silent_s = 0.0 if self._pulses != before else silent_s + self._look_s
                if silent_s > self._patience_s and not found.done():
                    raise LoopBlocked(self.abandon())
                if waited_s >= most_s and not found.done():
                    raise TimeoutError(f"no result within {most_s:g} s")
        except BaseException:  # of a signal's handler, say
            self._post(self._cancel)
            raise
        return found.result()

    def abandon(self) -> str:
        """Let the loop end by itself as soon as it is no longer blocked; returns the stack of its thread."""
        self._abandoned = True
        frame = sys._current_frames().get(self._thread.ident or 0)
        self._post(self._begin_end)
        if frame is None:
            return "  (the thread has ended)"
        stack = traceback.extract_stack(frame)
        calls = list(dropwhile(lambda each: not _MACHINERY.isdisjoint(_places(each.filename)), stack))
        return visible("".join(traceback.format_list(calls or stack)).rstrip())

    def close(self, within_s: float) -> bool:
        """Cancel all tasks and end the thread; whether it ended within so many seconds."""
        self._post(self._begin_end)
        self._thread.join(within_s)
        return not self.alive

    def _work(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            while self._ending is None or not self._ending.done():  # an environment may call `stop`, too
                with suppress(SystemExit, KeyboardInterrupt):  # of a task that an environment started
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
        """Cancel all tasks, and wait a limited time for them."""
        self.loop.set_exception_handler(lambda _, context: logger.debug("left behind: %s", context["message"]))
        if others := self._cancel():
            await asyncio.wait(others, timeout=SHUT_S)
        await asyncio.wait({asyncio.ensure_future(self.loop.shutdown_asyncgens())}, timeout=SHUT_S)


class BlockedLoops:
    """The abandoned loops of one environment: the first is logged, and too many end the run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[LoopThread] = []
        self._logged = False

    def add(self, environment: str, patience_s: float, thread: LoopThread, stack: str) -> None:
        """Count a loop that was abandoned.

        Raises:
            EnvironmentFailure: more than `MOST_BLOCKED` threads are blocked at this moment.
        """
        with self._lock:
            self._threads = [each for each in self._threads if each.alive] + [thread]
            first, self._logged, blocked = not self._logged, True, len(self._threads)
        if first:
            logger.warning(
                "environment %s blocked its event loop for more than %g s (timeout_s plus a grace period), and the "
                "loop was abandoned (shown once). All episodes with a call on this loop fail. Use `def` instead of "
                "`async def` for code that blocks, such as time.sleep, requests or subprocess.run. The thread is in:"
                "\n%s",
                environment,
                patience_s,
                stack,
            )
        if blocked > MOST_BLOCKED:
            raise EnvironmentFailure(
                f"environment {environment}: {blocked} threads are blocked by calls that do not return. Use `def` "
                "instead of `async def` for code that blocks, and set timeouts in it. The last thread is in:\n"
                f"{stack}"
            )


class DaemonThreads(ThreadPoolExecutor):
    """What `asyncio.to_thread` of an environment runs in; neither a batch nor the process waits for late calls."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Start a thread for this call."""
        found: Future[T] = Future()

        def work() -> None:
            if found.set_running_or_notify_cancel():
                try:
                    found.set_result(fn(*args, **kwargs))
                except BaseException as error:
                    found.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return found


def _places(filename: str) -> set[Path]:
    """A file and its folder."""
    return {Path(filename), Path(filename).parent}

"""The event loop of an environment, in a daemon thread: shared by concurrent batches, left when a call blocks it."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from realign.errors import RewardError

logger = logging.getLogger(__name__)

T = TypeVar("T")

GRACE_S = 5.0
"""Seconds beyond `timeout_s` that a canceled call has to end, and that an event loop may be blocked."""
POLL_S = 0.5
"""Seconds between two checks that a loop runs callbacks."""
END_S = 1.0
"""Seconds that canceled tasks have to end while their loop is being closed."""
MOST_BLOCKED = 16
"""Blocked threads of one environment above which the run stops. Each keeps its memory until its call returns."""


class EnvironmentFailure(RewardError):
    """Raised when environments fail too often for the run to continue."""


class LoopBlocked(RuntimeError):
    """A call blocks the thread of an event loop."""


class DaemonThreads(ThreadPoolExecutor):
    """Executor that runs each call in a daemon thread, for which neither a batch nor the process waits.

    asyncio accepts no other class as default executor. The threads of the base class never start.
    """

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run a call in a daemon thread."""
        future: Future[T] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return future


@dataclass(frozen=True)
class Limits:
    """Limits of the calls of one environment, shared by its concurrent batches."""

    timeout_s: float
    """Seconds that one call may take."""
    concurrency: int
    """Calls at a time."""
    grace_s: float = GRACE_S
    """See `GRACE_S`."""

    @property
    def patience_s(self) -> float:
        """Seconds without progress after which an event loop counts as blocked."""
        return self.timeout_s + self.grace_s


class LoopThread:
    """An event loop that runs in a daemon thread until `end`."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(DaemonThreads())
        self.slots = asyncio.Semaphore(limits.concurrency)
        """Held by each call."""
        self._beats = 0
        self._ending: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="environments", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread is running, busy or blocked."""
        return self._thread.is_alive()

    def beat(self) -> None:
        """Note that the loop is not blocked. Every call does so before it begins."""
        self._beats += 1

    def run(self, work: Coroutine[Any, Any, T], most_s: float = math.inf) -> T:
        """Run a coroutine on the loop and return its result. A signal interrupts the wait and cancels the coroutine.

        Args:
            work: the coroutine.
            most_s: maximum wait in seconds.

        Raises:
            LoopBlocked: the loop made no progress for `patience_s`.
            TimeoutError: there is no result after `most_s` seconds.
        """
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        silent_s = waited_s = 0.0  # sums of checks, not clock time: suspending the process must not count
        poll_s = min(POLL_S, self.limits.patience_s / 4)
        try:
            while not future.done():
                before = self._beats
                # a loop that a call blocks does not run this, so the number stays the same
                self.loop.call_soon_threadsafe(self.beat)
                wait((future,), poll_s)
                waited_s += poll_s
                silent_s = 0.0 if self._beats != before else silent_s + poll_s
                if silent_s > self.limits.patience_s and not future.done():
                    raise LoopBlocked
                if waited_s >= most_s and not future.done():
                    raise TimeoutError(f"no result within {most_s:g} s")
        except BaseException:  # for example from a signal handler
            future.cancel()
            raise
        if future.cancelled():  # another batch has abandoned the loop, which a call no longer blocks
            raise LoopBlocked
        return future.result()

    def end(self, within_s: float = 0.0) -> bool:
        """Cancel all tasks, and end the thread once no call blocks it. Returns whether it ended within this time."""
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self._begin_end)
        self._thread.join(within_s)
        return not self.alive

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            while self._ending is None or not self._ending.done():  # an environment may call `stop` too
                with suppress(SystemExit, KeyboardInterrupt):  # raised in a task that an environment started
                    self.loop.run_forever()
        finally:
            self.loop.close()

    def _begin_end(self) -> None:
        if self._ending is None:
            self._ending = self.loop.create_task(self._end())
            self._ending.add_done_callback(lambda _: self.loop.stop())

    async def _end(self) -> None:
        """Cancel all tasks and wait for them, for a limited time."""
        self.loop.set_exception_handler(lambda _, context: logger.debug("left behind: %s", context["message"]))
        others = asyncio.all_tasks(self.loop) - {self._ending}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=END_S)
        await asyncio.wait({asyncio.ensure_future(self.loop.shutdown_asyncgens())}, timeout=END_S)


class SharedLoop:
    """The loop of the concurrent batches of an environment, each in a `with` block; it ends with the last of them.

    A loop that a call blocks is left to itself, and the next call starts another one.

    Args:
        name: name of the environment, for messages.
        limits: limits of the calls.
    """

    def __init__(self, name: str, limits: Limits) -> None:
        self.limits = limits
        self._name = name
        self._lock = threading.Lock()  # guards the attributes below
        self._batches = 0
        self._thread: LoopThread | None = None
        self._blocked: list[LoopThread] = []
        self._logged = False

    def __enter__(self) -> Self:
        with self._lock:
            self._batches += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._lock:
            self._batches -= 1
            if self._batches or (thread := self._thread) is None:
                return
            self._thread = None
        interrupted = kind is not None and not issubclass(kind, Exception)
        if not thread.end(0.0 if interrupted else self.limits.patience_s) and not interrupted:
            self.abandon(thread)

    @property
    def thread(self) -> LoopThread:
        """The loop, which starts now if there is none."""
        with self._lock:
            self._thread = self._thread or LoopThread(self.limits)
            return self._thread

    def abandon(self, thread: LoopThread) -> None:
        """Leave a loop that a call blocks. Log the first one, and stop the run if there are too many.

        Raises:
            EnvironmentFailure: more than `MOST_BLOCKED` threads are currently blocked.
        """
        thread.end()
        with self._lock:
            if self._thread is thread:
                self._thread = None
            if thread not in self._blocked:
                self._blocked = [other for other in self._blocked if other.alive] + [thread]
            first, self._logged, blocked = not self._logged, True, len(self._blocked)
        if first:
            logger.warning(
                "environment %s blocked its event loop for more than %g s (timeout_s plus a grace period). Its "
                "unfinished episodes get no reward; the run continues. Use `def` instead of `async def` for code that "
                "blocks, such as time.sleep, requests or subprocess.run. Later cases are counted, not logged.",
                self._name,
                self.limits.patience_s,
            )
        if blocked > MOST_BLOCKED:
            raise EnvironmentFailure(
                f"environment {self._name}: {blocked} threads are blocked by calls that do not return. Use `def` "
                "instead of `async def` for code that blocks, and set timeouts in it."
            )

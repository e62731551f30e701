"""Calling environments, each of which can only fail alone: coroutines on an event loop, plain functions in threads."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from realign.environments.answers import Step
from realign.environments.slots import Slots
from realign.rewards.text import visible

logger = logging.getLogger(__name__)

T = TypeVar("T")

_OWN = {__file__, asyncio.timeouts.__file__}


@dataclass(frozen=True)
class Answer:
    """What came of one call: a step, or why there is none (a traceback, or an explanation)."""

    step: Step | None
    failure: str = ""


@dataclass(frozen=True)
class Limits:
    """Of calls."""

    timeout_s: float
    """Seconds that one may take."""
    slots: Slots
    """For those that are under way, also of other threads."""


class Asker:
    """Makes calls of environments, concurrently, inside one event loop.

    A coroutine function runs on the loop: while it waits, others run; one that computes holds all of them up, and its
    deadline too. A plain function runs in a thread of its own; one that is late is left behind, since threads cannot be
    stopped.

    Args:
        name: of the environment, for messages.
        limits: of its calls.
    """

    def __init__(self, name: str, limits: Limits) -> None:
        self.name = name
        self.timeout_s = limits.timeout_s
        self.slots = limits.slots

    async def ask(self, call: Callable[[], Any], read: Callable[[Any], Step]) -> Answer:
        """Make a call and read what it returns; whatever it does, short of ending the process, becomes an `Answer`."""
        deadline = asyncio.timeout(self.timeout_s)
        try:
            async with self.slots, deadline:
                found = await result_of(call)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the run is being ended; otherwise something of the environment's own was cancelled
            return Answer(None, _described(error))
        except (Exception, SystemExit) as error:
            late = isinstance(error, TimeoutError) and deadline.expired()
            return Answer(None, f"no answer within timeout_s={self.timeout_s:g}" if late else _described(error))
        try:
            return Answer(read(found))
        except ValueError as error:
            return Answer(None, f"ValueError: environment {self.name}: {error}")


async def result_of(call: Callable[[], Any]) -> Any:
    """What `call` returns: awaited if it is a coroutine function, else computed in a thread."""
    if inspect.iscoroutinefunction(call):
        return await call()
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not done.done():  # late: nobody waits any more
            done.set_result((value, error))

    def work() -> None:
        value, error = None, None
        try:
            value = call()
        except BaseException as raised:
            error = raised
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:
            logger.debug("an environment answered after its episodes had ended")

    threading.Thread(target=work, daemon=True).start()  # daemon: one that hangs must not keep the process alive
    value, error = await done
    if error is not None:
        raise error
    return await value if inspect.isawaitable(value) else value


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


def _described(error: BaseException) -> str:
    """The traceback, from the environment's own code on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _OWN:
        trace = trace.tb_next
    return visible("".join(traceback.format_exception(type(error), error, trace)).rstrip())

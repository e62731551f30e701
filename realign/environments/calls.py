"""Call environments under a deadline: coroutine functions on an event loop, plain functions in threads."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from realign.environments.concurrency import Slots
from realign.environments.event_loops import BlockedLoops
from realign.environments.results import Step
from realign.text import visible

logger = logging.getLogger(__name__)

GRACE_S = 5.0
"""Seconds beyond `timeout_s` that a cancelled call has to end, and that an event loop may be blocked."""


@dataclass(frozen=True)
class Answer:
    """Result of one call: a step, or the reason of its failure (a traceback or an explanation)."""

    step: Step | None
    failure: str = ""


@dataclass(frozen=True)
class Limits:
    """Limits of the calls of one environment class, shared by all its batches."""

    timeout_s: float
    """Seconds that one call may take."""
    slots: Slots
    """Limit on concurrent calls, shared by all threads."""
    blocked: BlockedLoops = field(default_factory=BlockedLoops)
    """Event loops that were abandoned because a call blocked them."""
    grace_s: float = GRACE_S
    """See `GRACE_S`."""

    @property
    def patience_s(self) -> float:
        """Seconds without progress after which an event loop counts as blocked."""
        return self.timeout_s + self.grace_s


class Asker:
    """Calls environments concurrently on one event loop.

    A coroutine function runs on the loop and is cancelled at its deadline. If it ignores the cancellation, it is left
    running and no longer awaited. A plain function runs in a new thread. At its deadline it is left running, since
    threads cannot be stopped.

    Args:
        name: name of the environment, for messages.
        limits: limits of the calls.
        pulse: called on the loop before each call begins; raises CancelledError if no call may begin.
    """

    def __init__(self, name: str, limits: Limits, pulse: Callable[[], None]) -> None:
        self.name = name
        self.limits = limits
        self.pulse = pulse

    async def ask(
        self, call: Callable[[], Any], read: Callable[[Any], Step], keep: Callable[[Answer], None] | None = None
    ) -> Answer:
        """Make a call and parse its return value; every exception of the call becomes an `Answer`.

        Args:
            call: calls a method of an environment.
            read: checks and converts the return value.
            keep: called with the answer as soon as the call ends in time. A later call that blocks the loop therefore
                cannot lose the answer.
        """
        late = False

        async def answer() -> Answer:
            self.pulse()
            found = await self._answer(call, read)
            if keep is not None and not late:
                keep(found)
            return found

        limits = self.limits
        async with limits.slots:
            task = asyncio.ensure_future(answer())
            try:
                await asyncio.wait({task}, timeout=limits.timeout_s)
                if task.done():
                    return task.result()
                late = True
                task.cancel()
                await asyncio.wait({task}, timeout=limits.grace_s)
            except asyncio.CancelledError:
                task.cancel()
                raise
        ignored = "" if task.done() else "; the call ignored its cancellation and was left running"
        return Answer(None, f"no answer within timeout_s={limits.timeout_s:g}{ignored}")

    async def _answer(self, call: Callable[[], Any], read: Callable[[Any], Step]) -> Answer:
        try:
            found = await result_of(call)
        except BaseException as error:  # includes SystemExit, which would end the event loop if raised in a task
            return Answer(None, _described(error))
        try:
            return Answer(read(found))
        except ValueError as error:
            return Answer(None, f"ValueError: environment {self.name}: {error}")


async def result_of(call: Callable[[], Any]) -> Any:
    """Return the result of `call`. Awaits a coroutine function; runs any other function in a new thread."""
    if inspect.iscoroutinefunction(call):
        return await call()
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not done.done():  # after the deadline the future is already cancelled
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

    threading.Thread(target=work, daemon=True).start()  # daemon: a hanging call must not keep the process alive
    value, error = await done
    if error is not None:
        raise error
    return await value if inspect.isawaitable(value) else value


def _described(error: BaseException) -> str:
    """Format the traceback, starting at the environment's code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return visible("".join(traceback.format_exception(type(error), error, trace)).rstrip())

"""Calls of environments: how many at a time (`Slots`), their deadline (`Asker`), and what they may return (`Step`).

Coroutine functions run on an event loop, plain functions in threads.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakSet

import torch

from realign.api.environment import EpisodeFailure
from realign.environments.event_loops import BlockedLoops
from realign.environments.turns import shortened
from realign.errors import TransientError
from realign.text import visible

LARGEST = torch.finfo(torch.float32).max
"""Largest absolute reward, since rewards are stored in fp32."""


@dataclass(frozen=True)
class Step:
    """Checked result of `reset` or `step`: the observation tokens, and the reward and end flags of the turn."""

    tokens: Sequence[int] = ()
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    role_rewards: Mapping[str, float] = field(default_factory=dict)
    """Reward of each role, at the end of an agent's episode with roles."""

    @property
    def over(self) -> bool:
        """Whether the episode is over."""
        return self.terminated or self.truncated


def begun(returned: Any, tokens: Callable[[Any], Sequence[int]]) -> Step:
    """Check the return value of `reset`.

    Args:
        returned: the return value, expected to be (observation, info).
        tokens: encodes the observation.

    Raises:
        ValueError: the return value is invalid.
    """
    if not isinstance(returned, tuple | list) or len(returned) != 2 or not isinstance(returned[1], Mapping):
        raise ValueError(f"reset returned {shortened(returned)}, expected 2 values: observation, info (a dict)")
    return Step(tokens(returned[0]))


def five_values(returned: Any, tokens: Callable[[Any], Sequence[int]]) -> Step:
    """Check the return value of `step`.

    Args:
        returned: the return value, expected to be (observation, reward, terminated, truncated, info).
        tokens: encodes the observation; called only if another turn follows.

    Raises:
        ValueError: the return value is invalid.
    """
    if not isinstance(returned, tuple | list) or len(returned) != 5:
        size = f"{len(returned)} values" if isinstance(returned, tuple | list) else shortened(returned)
        raise ValueError(f"step returned {size}, expected 5: observation, reward, terminated, truncated, info")
    observation, reward, terminated, truncated, _ = returned
    ends = []
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        value = _plain(value)
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {shortened(value)}, expected True or False")
        ends.append(value)
    number, over = finite_reward(reward), any(ends)
    return Step(() if over else tokens(observation), number, ends[0], ends[1] and not ends[0])


def finite_reward(reward: Any) -> float:
    """Return a reward as a number.

    Raises:
        ValueError: it is no number, or not finite in float32.
    """
    number = _plain(reward)
    if not isinstance(number, int | float) or not abs(number) <= LARGEST:
        raise ValueError(f"the reward is {shortened(reward)}, expected a number that is finite in float32")
    return float(number)


def _plain(value: Any) -> Any:
    """Convert scalars of numpy and torch to Python scalars."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


_Task: TypeAlias = "asyncio.Task[Any]"


class Slots:
    """A first-in first-out semaphore for tasks of several event loops. A task holds at most one slot.

    `asyncio.Semaphore` belongs to one loop, and `threading.Semaphore` blocks the event loop while it waits. The tasks
    of a blocked loop cannot release their slots, so `abandon` releases them.
    """

    def __init__(self, number: int) -> None:
        """Allow `number` tasks at a time."""
        self._lock = threading.Lock()  # guards the attributes below
        self._free = number
        self._waiting: deque[tuple[_Task, asyncio.Future[None]]] = deque()
        self._holders: dict[_Task, asyncio.AbstractEventLoop] = {}
        self._abandoned: WeakSet[asyncio.AbstractEventLoop] = WeakSet()

    async def __aenter__(self) -> None:
        """Wait for a slot.

        Raises:
            CancelledError: the loop was abandoned.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        with self._lock:
            if loop in self._abandoned:
                raise asyncio.CancelledError("the event loop was abandoned")
            if self._free:
                self._free -= 1
                self._holders[task] = loop
                return
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append((task, turn))
        try:
            await turn
        except asyncio.CancelledError:
            with self._lock:
                if (task, turn) in self._waiting:
                    self._waiting.remove((task, turn))
                self._release(task)  # the slot may have been granted before the task was canceled
            raise

    async def __aexit__(self, *raised: object) -> None:
        task = asyncio.current_task()
        assert task is not None
        with self._lock:
            self._release(task)

    def abandon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Release the slots of this loop's tasks, and reject further tasks of the loop."""
        with self._lock:
            self._abandoned.add(loop)
            self._waiting = deque((task, turn) for task, turn in self._waiting if turn.get_loop() is not loop)
            for task in [task for task, home in self._holders.items() if home is loop]:
                self._release(task)

    def _release(self, task: _Task) -> None:
        """Pass the slot of this task to the next waiting task, if it holds one. The caller holds the lock."""
        if self._holders.pop(task, None) is None:
            return
        while self._waiting:
            following, turn = self._waiting.popleft()
            loop = turn.get_loop()
            try:
                loop.call_soon_threadsafe(_grant, turn)
            except RuntimeError:  # the loop is closed, so its task no longer waits
                continue
            self._holders[following] = loop
            return
        self._free += 1


def _grant(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


GRACE_S = 5.0
"""Seconds beyond `timeout_s` that a canceled call has to end, and that an event loop may be blocked."""


@dataclass(frozen=True)
class Answer:
    """Result of one call: a step, or the reason of its failure (a traceback or an explanation) and its kind."""

    step: Step | None
    failure: str = ""
    kind: EpisodeFailure | None = None


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

    A coroutine function runs on the loop and is canceled at its deadline. If it ignores the cancellation, it is left
    running and no longer awaited. A plain function runs in a thread (`DaemonThreads`). At its deadline it is left
    running, since threads cannot be stopped.

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
            answered = await self._answer(call, read)
            if keep is not None and not late:
                keep(answered)
            return answered

        limits = self.limits
        async with limits.slots:
            task = asyncio.ensure_future(answer())
            try:
                # Unlike `wait_for`, `wait` also returns if the call ignores its cancellation.
                await asyncio.wait({task}, timeout=limits.timeout_s)
                if task.done():
                    return task.result()
                # Before the cancellation, which a call may still answer: that answer comes too late.
                late = True
                task.cancel()
                await asyncio.wait({task}, timeout=limits.grace_s)
            except asyncio.CancelledError:
                task.cancel()
                raise
        ignored = "" if task.done() else "; the call ignored its cancellation and was left running"
        return Answer(None, f"no answer within timeout_s={limits.timeout_s:g}{ignored}", EpisodeFailure.timeout)

    async def _answer(self, call: Callable[[], Any], read: Callable[[Any], Step]) -> Answer:
        try:
            returned = await result_of(call)
        except BaseException as error:  # includes SystemExit, which would end the event loop if raised in a task
            return Answer(None, _described(error), kind_of(error))
        try:
            return Answer(read(returned))
        except ValueError as error:
            return Answer(None, f"ValueError: environment {self.name}: {error}", EpisodeFailure.exception)


def kind_of(error: BaseException) -> EpisodeFailure:
    """Return the kind of failure of an exception."""
    if isinstance(error, TimeoutError):
        return EpisodeFailure.timeout
    unreachable = isinstance(error, ConnectionError | TransientError)
    return EpisodeFailure.infrastructure if unreachable else EpisodeFailure.exception


async def result_of(call: Callable[[], Any]) -> Any:
    """Return the result of `call`. Awaits a coroutine function; runs any other function in a thread of the loop."""
    if inspect.iscoroutinefunction(call):
        return await call()
    # as a value, since no future can carry a StopIteration
    value, error = await asyncio.get_running_loop().run_in_executor(None, _outcome, call)
    if error is not None:
        raise error
    return await value if inspect.isawaitable(value) else value


def _outcome(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return call(), None
    except BaseException as error:
        return None, error


def _described(error: BaseException) -> str:
    """Format the traceback, starting at the environment's code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return visible("".join(traceback.format_exception(type(error), error, trace)).rstrip())

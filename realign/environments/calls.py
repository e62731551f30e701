"""Calls of environments: their deadline (`call_in_time`), and what they may return (`Step`)."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from realign.api.environment import EpisodeFailure
from realign.environments.event_loops import LoopThread
from realign.environments.turns import abbreviate
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
    call_rewards: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Rewards of the calls of each role ("" without roles), for an agent that returned one for each."""

    @property
    def over(self) -> bool:
        """Whether the episode is over."""
        return self.terminated or self.truncated


def read_reset(returned: Any, tokens: Callable[[Any], Sequence[int]]) -> Step:
    """Check the return value of `reset`.

    Args:
        returned: the return value, expected to be (observation, info).
        tokens: encodes the observation.

    Raises:
        ValueError: the return value is invalid.
    """
    if not isinstance(returned, tuple | list) or len(returned) != 2 or not isinstance(returned[1], Mapping):
        raise ValueError(f"reset returned {abbreviate(returned)}, expected 2 values: observation, info (a dict)")
    return Step(tokens(returned[0]))


def read_step(returned: Any, tokens: Callable[[Any], Sequence[int]]) -> Step:
    """Check the return value of `step`.

    Args:
        returned: the return value, expected to be (observation, reward, terminated, truncated, info).
        tokens: encodes the observation; called only if another turn follows.

    Raises:
        ValueError: the return value is invalid.
    """
    if not isinstance(returned, tuple | list) or len(returned) != 5:
        size = f"{len(returned)} values" if isinstance(returned, tuple | list) else abbreviate(returned)
        raise ValueError(f"step returned {size}, expected 5: observation, reward, terminated, truncated, info")
    observation, reward, terminated, truncated, _ = returned
    ends = []
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        value = _plain(value)
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {abbreviate(value)}, expected True or False")
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
        raise ValueError(f"the reward is {abbreviate(reward)}, expected a number that is finite in float32")
    return float(number)


def _plain(value: Any) -> Any:
    """Convert scalars of numpy and torch to Python scalars."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


@dataclass(frozen=True)
class Answer:
    """Result of one call: a step, or the reason of its failure (a traceback or an explanation) and its kind."""

    step: Step | None
    failure: str = ""
    kind: EpisodeFailure | None = None


async def call_in_time(
    thread: LoopThread,
    name: str,
    call: Callable[[], Any],
    read: Callable[[Any], Step],
    keep: Callable[[Answer], None] | None = None,
) -> Answer:
    """Make a call on a loop and read its return value; every exception of the call becomes an `Answer`.

    A coroutine function runs on the loop and is canceled at its deadline. If it ignores the cancellation, it is left
    running and no longer awaited. A plain function runs in a thread (`DaemonThreads`). At its deadline it is left
    running, since threads cannot be stopped.

    Args:
        thread: the loop.
        name: name of the environment, for messages.
        call: calls a method of an environment.
        read: checks and converts the return value.
        keep: called with the answer as soon as the call ends in time. A later call that blocks the loop therefore
            cannot lose the answer.
    """
    late = False

    async def answer() -> Answer:
        thread.beat()
        answered = await _answer(name, call, read)
        if keep is not None and not late:
            keep(answered)
        return answered

    limits = thread.limits
    async with thread.slots:
        task = asyncio.ensure_future(answer())
        try:
            # unlike `wait_for`, `wait` also returns if the call ignores its cancellation
            await asyncio.wait({task}, timeout=limits.timeout_s)
            if task.done():
                return task.result()
            # before the cancellation, which a call may still answer: that answer comes too late
            late = True
            task.cancel()
            await asyncio.wait({task}, timeout=limits.grace_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
    ignored = "" if task.done() else "; the call ignored its cancellation and was left running"
    return Answer(None, f"no answer within timeout_s={limits.timeout_s:g}{ignored}", EpisodeFailure.timeout)


async def _answer(name: str, call: Callable[[], Any], read: Callable[[Any], Step]) -> Answer:
    try:
        returned = await result_of(call)
    except BaseException as error:  # includes SystemExit, which would end the event loop if raised in a task
        return Answer(None, _format_traceback(error), _kind_of(error))
    try:
        return Answer(read(returned))
    except ValueError as error:
        return Answer(None, f"ValueError: environment {name}: {error}", EpisodeFailure.exception)


def _kind_of(error: BaseException) -> EpisodeFailure:
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


def _format_traceback(error: BaseException) -> str:
    """Format the traceback, starting at the environment's code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return visible("".join(traceback.format_exception(type(error), error, trace)).rstrip())

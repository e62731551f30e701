"""Code of a worker process of the reward pool: apply limits, call the reward function, check its return value.

Imports only light modules, so that a worker starts as fast as the user's function allows.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection
from typing import Any, NamedTuple

from realign.rewards.pool.answers import Answer, FailureKind, Problem, as_answer
from realign.rewards.pool.functions import load_function
from realign.rewards.pool.http import Unreachable
from realign.rewards.pool.items import Item
from realign.rewards.pool.keeper import keeper_sentinels
from realign.rewards.pool.limits import Limits, allow_cpu, drop_secrets, limit_process
from realign.rewards.pool.memory_watch import retire, watch


class Concurrency(NamedTuple):
    """How a worker calls an `async def` function."""

    calls: int
    """Calls at a time."""
    timeout_s: float
    """Time limit of one call, after which it is cancelled. After the same time, a chunk starts no further call."""


def answer(function: Callable[..., Any], item: Item) -> Answer:
    """Call the function on one item. Every outcome except the end of the process becomes an `Answer`."""
    try:
        return as_answer(function(*item.arguments), item.expected)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # includes SystemExit: sys.exit fails only this item
        return _problem(error)


async def answer_concurrently(
    function: Callable[..., Any], items: Sequence[Item], how: Concurrency, cpu_s: float | None = None
) -> list[Answer]:
    """Call an `async def` function on the items, several at a time. Answers at least one item, but maybe not all.

    Returns:
        The answers to the first items, in order.
    """
    loop, slots = asyncio.get_running_loop(), asyncio.Semaphore(how.calls)
    stop = loop.time() + how.timeout_s
    tasks: list[asyncio.Task[Answer]] = []
    for item in items:
        await slots.acquire()
        if tasks and loop.time() > stop:
            break
        allow_cpu(cpu_s)
        tasks.append(asyncio.create_task(_awaited(function, item, how.timeout_s)))
        tasks[-1].add_done_callback(lambda _: slots.release())
    return list(await asyncio.gather(*tasks))


async def _awaited(function: Callable[..., Any], item: Item, timeout_s: float) -> Answer:
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return as_answer(await function(*item.arguments), item.expected)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, TimeoutError) and limit.expired():
            return Problem(FailureKind.timeout, f"no answer within timeout_s={timeout_s} s; the call was cancelled")
        return _problem(error)


def _problem(error: BaseException) -> Problem:
    if isinstance(error, Unreachable):
        return Problem(FailureKind.unreachable, str(error))
    if isinstance(error, MemoryError):
        # Free the objects of the dead frames first; otherwise there may be no memory to format the error.
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        return Problem(FailureKind.memory, _describe(error))
    return Problem(FailureKind.exception, _describe(error))


def _describe(error: BaseException) -> str:
    trace = error.__traceback__.tb_next if error.__traceback__ else None  # without the frame of `answer`
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


# --- in the worker process only ---


@functools.lru_cache(maxsize=1)
def resolve(source: str | bytes) -> Callable[..., Any]:
    """Load the function by its name or from its pickle, once per worker. The pool has already checked it."""
    return load_function(source, check=False) if isinstance(source, str) else pickle.loads(source)


@functools.lru_cache(maxsize=1)
def _runner() -> asyncio.Runner:
    """Return the event loop of this worker. It stays open between calls, since clients keep their connections on it."""
    return asyncio.Runner()


def start_worker(source: str | bytes, limits: Limits) -> None:
    """Prepare a new worker: exit with the parent process, drop secrets, load the function, apply the limits."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    drop_secrets(limits.keep_environment)
    # Load the function now, so that its imports do not count against an item. If they fail, every item reports it.
    with suppress(Exception):
        resolve(source)
    limit_process(limits)


def _die_with_parent() -> None:
    """Exit when the run or the keeper of this worker is gone. The keeper then kills what the function started."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel, *keeper_sentinels()])
    os._exit(1)


def answer_some(
    source: str | bytes, pickled: Sequence[bytes], slice_s: float, cpu_s: float | None = None
) -> list[Answer]:
    """Answer the items in order until `slice_s` seconds are over. Answers at least one item, but maybe not all.

    The system kills the worker if a call uses more than `cpu_s` seconds of CPU time. A worker that keeps too much
    memory between two calls exits with code `memory_watch.RETIRED` before it answers an item.
    """
    if watch().called and watch().leaks():
        retire()
    started = time.monotonic()
    answers: list[Answer] = []
    for item in pickled:
        allow_cpu(cpu_s)
        answers.append(_answer_pickled(source, item))
        if watch().leaks() or time.monotonic() - started > slice_s:
            break
    return answers


def answer_some_async(
    source: str | bytes, pickled: Sequence[bytes], how: Concurrency, cpu_s: float | None = None
) -> list[Answer]:
    """Answer the items with an `async def` function, several at a time; see `answer_some`, `answer_concurrently`."""
    if watch().called and watch().leaks():
        retire()
    try:
        function, items = resolve(source), [pickle.loads(item) for item in pickled]
    except Exception as error:
        return [Problem(FailureKind.exception, _describe(error))] * len(pickled)
    answers = _runner().run(answer_concurrently(function, items, how, cpu_s))
    watch().leaks()
    return answers


def _answer_pickled(source: str | bytes, pickled: bytes) -> Answer:
    try:
        function, item = resolve(source), pickle.loads(pickled)
    except Exception as error:
        return Problem(FailureKind.exception, _describe(error))
    return answer(function, item)

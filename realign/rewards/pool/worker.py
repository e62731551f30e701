"""Code of a worker process of the reward pool: apply limits, call the reward function, check its return value.

Imports only light modules, so that a worker starts as fast as the user's function allows.
"""

from __future__ import annotations

import functools
import gc
import math
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from multiprocessing import connection
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

from realign.rewards.pool.functions import load_function
from realign.rewards.pool.http import Unreachable
from realign.rewards.pool.limits import Limits, allow_cpu, drop_secrets, limit_process
from realign.rewards.pool.memory_watch import retire, watch
from realign.rewards.text import visible

Item: TypeAlias = tuple[str, str, dict[str, Any]] | tuple[str, str, dict[str, Any], list[str]]
"""Prompt, response and row. With the tokens of the response, the function must return one number per token."""

# Rewards become fp32 tensors, so numbers that overflow in fp32 are rejected like infinite ones.
_LARGEST = 3.4028234663852886e38


class FailureKind(StrEnum):
    """Reason why an item has no reward. A function that exits its process with code 0 is reported as a timeout."""

    exception = "exception"
    timeout = "timeout"
    crash = "crash"
    memory = "memory"
    nonsense = "nonsense"
    unreachable = "unreachable"


class Problem(NamedTuple):
    """A failed item, as sent by the worker. It contains only strings, so that it can always be pickled."""

    kind: FailureKind
    message: str


Answer: TypeAlias = float | list[float] | Problem | None


def answer(function: Callable[..., Any], item: Item) -> Answer:
    """Call the function on one item. Every outcome except the end of the process becomes an `Answer`."""
    try:
        value = function(*item)
        return _as_numbers(value, len(item[3])) if len(item) == 4 else _as_number(value)
    except MemoryError as error:
        # Free the objects of the dead frames first; otherwise there may be no memory to format the error.
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        return Problem(FailureKind.memory, _describe(error))
    except KeyboardInterrupt:
        raise
    except Unreachable as error:
        return Problem(FailureKind.unreachable, str(error))
    except BaseException as error:  # includes SystemExit: sys.exit fails only this item
        return Problem(FailureKind.exception, _describe(error))


def _as_numbers(value: Any, n: int) -> Answer:
    """Convert a list, a tuple, or a vector of numpy or torch to `n` finite numbers."""
    if value is None:
        return None
    expected = f"a list of {n} numbers (one per token of the response) | None"
    found = value.tolist() if getattr(value, "ndim", None) == 1 else value
    if not isinstance(found, list | tuple):
        return _nonsense(value, "is not a list", expected)
    if len(found) != n:
        return _nonsense(value, f"has {len(found)} elements", expected)
    numbers = [_as_number(x) for x in found]
    if bad := [i for i, x in enumerate(numbers) if not isinstance(x, float)]:
        return _nonsense(value, f"holds {found[bad[0]]!r} for token {bad[0]}, no number finite in float32", expected)
    return [x for x in numbers if isinstance(x, float)]


def _as_number(value: Any) -> float | Problem | None:
    if value is None:
        return None
    found = value
    if hasattr(found, "item") and getattr(found, "ndim", None) == 0:  # numpy scalars, 0-d arrays and 0-d tensors
        found = found.item()
    if not isinstance(found, Real):
        return _nonsense(value, "is not a number")
    try:
        number = float(found)
    except OverflowError:
        number = math.inf
    if math.isnan(number) or abs(number) > _LARGEST:
        return _nonsense(value, "is not finite in float32")
    return number


def _nonsense(value: Any, why: str, expected: str = "float | None") -> Problem:
    text = repr(value)
    text = text if len(text) <= 200 else text[:200] + "..."
    return Problem(FailureKind.nonsense, f"returned {text} ({type(value).__name__}), which {why}; expected {expected}")


def _describe(error: BaseException) -> str:
    trace = error.__traceback__.tb_next if error.__traceback__ else None  # without the frame of `answer`
    return visible("".join(traceback.format_exception(type(error), error, trace)).rstrip())


# --- in the worker process only ---


@functools.lru_cache(maxsize=1)
def resolve(source: str | bytes) -> Callable[..., Any]:
    """Load the function by its name or from its pickle, once per worker. The pool has already checked it."""
    return load_function(source, arguments=None) if isinstance(source, str) else pickle.loads(source)


def start_worker(source: str | bytes, limits: Limits) -> None:
    """Prepare a new worker: exit with the parent process, drop secrets, load the function, apply the limits."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    drop_secrets(limits.keep_environment)
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, lambda *_: _end_group())
    # Load the function now, so that its imports do not count against an item. If they fail, every item reports it.
    with suppress(Exception):
        resolve(source)
    limit_process(limits)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    _end_group()


def _end_group() -> None:
    """Kill this worker and every process that the reward function started."""
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
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


def _answer_pickled(source: str | bytes, pickled: bytes) -> Answer:
    try:
        function, item = resolve(source), pickle.loads(pickled)
    except Exception as error:
        return Problem(FailureKind.exception, _describe(error))
    return answer(function, item)

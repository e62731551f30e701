"""What a worker process of the reward pool does: apply limits, call the reward function, check what it returns.

The process of the run checks the answers of a worker again (`check_answers`), since a reward function shares its
process with this code and can change it. Imports only light modules, so that a worker starts as fast as the user's
function allows.
"""

from __future__ import annotations

import asyncio
import gc
import math
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

from realign.console import lasting_console
from realign.errors import DataError
from realign.rewards.pool.functions import load_function
from realign.rewards.pool.http import Unreachable
from realign.rewards.pool.limits import MemoryWatch, WorkerLimits, allow_cpu, limit_process
from realign.secrets import drop_secrets
from realign.text import brief, shorten, visible

# Rewards become fp32 tensors, so numbers that overflow in fp32 are rejected like infinite ones.
_LARGEST = 3.4028234663852886e38
_LONGEST_MESSAGE = 20_000
SLICE_S = 0.1
"""Seconds after which a worker returns its answers, so that a failed chunk loses little work and slow items spread."""


class FailureKind(StrEnum):
    """Reason why an item has no reward."""

    exception = "exception"
    timeout = "timeout"
    crash = "crash"
    memory = "memory"
    nonsense = "nonsense"
    unreachable = "unreachable"


@dataclass(frozen=True)
class Problem:
    """A failed item. Its message can quote a model, a server or a user's function, so it is escaped and shortened."""

    kind: FailureKind
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", visible(shorten(self.message, _LONGEST_MESSAGE)))


Answer: TypeAlias = float | list[float | None] | Problem | None


class Expected(NamedTuple):
    """What a function must return for one item: one number, or a list of numbers. None is always allowed."""

    n: int | None = None
    """Length of the list; None: one number."""
    of: str = "token"
    """What an element of the list is the reward of: a token of the response, or a response of the item."""
    gaps: bool = False
    """Whether an element of the list may be None."""
    key: str = ""
    """Key of the reward, where the function may return a mapping in its place; empty: it may not."""

    def __str__(self) -> str:
        if self.n is None:
            return "float | None"
        where = "of the response" if self.of == "token" else "in the same order"
        number = "numbers or None" if self.gaps else "numbers"
        return f"a list of {self.n} {number} (one per {self.of} {where}) | None"


ONE = Expected()


def as_answer(value: Any, expected: Expected) -> Answer:
    """Convert the return value of a reward function to what is expected, or to a failure."""
    value = _under(expected.key, value)
    return _as_number(value) if expected.n is None else _as_numbers(value, expected)


def _under(key: str, value: Any) -> Any:
    """Return the reward in a mapping, such as verl's `{"score": 1.0, ...}`; other values are returned unchanged."""
    return value[key] if key and isinstance(value, Mapping) and key in value else value


def _as_numbers(value: Any, expected: Expected) -> Answer:
    """Convert a list, a tuple, or a vector of numpy or torch to finite numbers, one per element."""
    if value is None:
        return None
    elements = value.tolist() if getattr(value, "ndim", None) == 1 else value
    if not isinstance(elements, list | tuple):
        return _nonsense(value, "is not a list", str(expected))
    if len(elements) != expected.n:
        return _nonsense(value, f"has {len(elements)} elements", str(expected))
    numbers: list[float | None] = []
    for place, element in enumerate(elements):
        number = _as_number(_under(expected.key, element))
        if isinstance(number, Problem) or (number is None and not expected.gaps):
            why = f"holds {element!r} for {expected.of} {place}, no number finite in float32"
            return _nonsense(value, why, str(expected))
        numbers.append(number)
    return numbers


def _as_number(value: Any) -> float | Problem | None:
    """Convert a number, or a scalar of numpy or torch, to a float that is finite in float32."""
    if value is None:
        return None
    scalar = value
    if hasattr(scalar, "item") and getattr(scalar, "ndim", None) == 0:  # numpy scalars, 0-d arrays and 0-d tensors
        scalar = scalar.item()
    if not isinstance(scalar, Real):
        return _nonsense(value, "is not a number")
    try:
        number = float(scalar)
    except OverflowError:
        number = math.inf
    if math.isnan(number) or abs(number) > _LARGEST:
        return _nonsense(value, "is not finite in float32")
    return number


def _nonsense(value: Any, why: str, expected: str = "float | None") -> Problem:
    return Problem(
        FailureKind.nonsense, f"returned {brief(value, 200)} ({type(value).__name__}), which {why}; expected {expected}"
    )


def check_answers(returned: object, expected: Sequence[Expected]) -> list[Answer] | None:
    """Check what a worker returned for a chunk, since a reward function can change the code of its worker.

    Args:
        returned: value that the worker returned. Not trusted, so no method of it is called.
        expected: expected answer to each item of the chunk.

    Returns:
        The answers to the first items of the chunk, at least one; invalid ones are failures. None if `returned` is
        no list of answers.
    """
    if type(returned) is not list or not 0 < len(returned) <= len(expected):
        return None
    return [_check_answer(value, wanted) for value, wanted in zip(returned, expected, strict=False)]


def _check_answer(value: Any, wanted: Expected) -> Answer:
    if value is None:
        return None
    if type(value) is Problem:
        fields = vars(value)  # a forged object can lack a field, or contain another type
        kind, message = fields.get("kind"), fields.get("message")
        if type(kind) is FailureKind and type(message) is str:
            return Problem(kind, message)
    elif wanted.n is None:
        if _is_reward(value):
            return float(value)
    elif (
        type(value) is list
        and len(value) == wanted.n
        and all(_is_reward(x) or (x is None and wanted.gaps) for x in value)
    ):
        return list(value)
    expected = "one finite number" if wanted.n is None else f"a list of {wanted.n} finite numbers"
    return Problem(
        FailureKind.nonsense,
        f"the worker returned an invalid answer ({type(value).__name__}); expected {expected}. The reward function "
        "probably changes modules of realign.",
    )


def _is_reward(value: object) -> bool:
    return type(value) is float and abs(value) <= _LARGEST


class RewardCall(NamedTuple):
    """One call of a reward function: its arguments, and what it must return."""

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    expected: Expected = ONE
    problem: str = ""
    """Why the function cannot be called; empty: it can."""

    def of(self, function: Callable[..., Any]) -> Any:
        """Call the function.

        Raises:
            DataError: it cannot be called; any other exception is its own.
        """
        if self.problem:
            raise DataError(self.problem)
        return function(*self.arguments, **self.keywords)


class Concurrency(NamedTuple):
    """How a worker calls an `async def` function."""

    calls: int
    """Calls at a time."""
    timeout_s: float
    """Time limit of one call, after which it is canceled. After the same time, a chunk starts no further call."""


def answer(function: Callable[..., Any], item: RewardCall) -> Answer:
    """Call the function on one item. Every outcome except the end of the process becomes an `Answer`."""
    try:
        return as_answer(item.of(function), item.expected)
    # With workers=0 this is the process of the run, which Ctrl-C must end.
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # includes SystemExit: sys.exit fails only this item
        return _problem(error)


async def answer_concurrently(
    function: Callable[..., Any], items: Sequence[RewardCall], how: Concurrency, cpu_s: float | None = None
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
        tasks.append(asyncio.create_task(_await_answer(function, item, how.timeout_s)))
        tasks[-1].add_done_callback(lambda _: slots.release())
    return list(await asyncio.gather(*tasks))


async def _await_answer(function: Callable[..., Any], item: RewardCall, timeout_s: float) -> Answer:
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return as_answer(await item.of(function), item.expected)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, TimeoutError) and limit.expired():
            return Problem(FailureKind.timeout, f"no answer within timeout_s={timeout_s} s; the call was canceled")
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
    trace = trace.tb_next if trace is not None and trace.tb_frame.f_code is RewardCall.of.__code__ else trace
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


# --- in the worker process only ---


def serve(pipe: Connection, source: str | bytes, limits: WorkerLimits, concurrency: Concurrency | None) -> None:
    """Answer the chunks that come through a pipe, until the run closes it.

    Sends None when the function is loaded. Then sends, for each chunk, the answers to its first items, and whether the
    run must replace this process because it keeps too much memory.

    Args:
        pipe: receives chunks: lists of pickled calls.
        source: name of the function, or its pickle. The pool has already checked it.
        limits: limits of this process.
        concurrency: how to call an `async def` function; None for other functions.
    """
    # Ctrl-C is for the run, which then stops its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    drop_secrets(limits.keep_environment)
    function: Callable[..., Any] | Problem
    try:  # before the first chunk, so that imports do not count against an item
        function = load_function(source, check=False) if isinstance(source, str) else pickle.loads(source)
    except Exception as error:
        function = Problem(FailureKind.exception, _describe(error))
    # After the import: `memory_mb` is what the function may use beyond it.
    limit_process(limits)
    memory = MemoryWatch()
    # the event loop stays open between chunks, since clients keep their connections on it
    with suppress(EOFError), lasting_console(), asyncio.Runner() as runner:
        pipe.send(None)
        while True:
            chunk: list[bytes] = pipe.recv()
            if isinstance(function, Problem):
                answers: list[Answer] = [function] * len(chunk)
            elif concurrency is None:
                answers = _answer_in_turn(function, chunk, limits.cpu_s, memory)
            else:
                answers = _answer_together(function, chunk, concurrency, limits.cpu_s, runner)
            pipe.send((answers, memory.leaks()))


def _answer_in_turn(
    function: Callable[..., Any], chunk: Sequence[bytes], cpu_s: float | None, memory: MemoryWatch
) -> list[Answer]:
    """Answer the items in order until `SLICE_S` is over or memory leaks: at least one item, but maybe not all.

    The system kills the process if a call uses more than `cpu_s` seconds of CPU time.
    """
    started = time.monotonic()
    answers: list[Answer] = []
    for pickled in chunk:
        allow_cpu(cpu_s)
        try:
            item = pickle.loads(pickled)
        except Exception as error:
            answers.append(Problem(FailureKind.exception, _describe(error)))
        else:
            answers.append(answer(function, item))
        if memory.leaks() or time.monotonic() - started > SLICE_S:
            break
    return answers


def _answer_together(
    function: Callable[..., Any],
    chunk: Sequence[bytes],
    how: Concurrency,
    cpu_s: float | None,
    runner: asyncio.Runner,
) -> list[Answer]:
    """Answer the items with an `async def` function, several at a time; see `answer_concurrently`."""
    try:
        items = [pickle.loads(pickled) for pickled in chunk]
    except Exception as error:
        return [Problem(FailureKind.exception, _describe(error))] * len(chunk)
    return runner.run(answer_concurrently(function, items, how, cpu_s))

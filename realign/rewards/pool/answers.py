"""Answers of reward workers: rewards or failures, made by a worker and checked again by the process that reads them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

from realign.rewards.text import shortened, visible

# Rewards become fp32 tensors, so numbers that overflow in fp32 are rejected like infinite ones.
_LARGEST = 3.4028234663852886e38
_LONGEST_MESSAGE = 20_000


class FailureKind(StrEnum):
    """Reason why an item has no reward. A function that exits its process with code 0 is reported as a timeout."""

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
        object.__setattr__(self, "message", visible(shortened(self.message, _LONGEST_MESSAGE)))


Answer: TypeAlias = float | list[float | None] | Problem | None


class Expected(NamedTuple):
    """What a function must return for one item: one number, or a list of numbers. None is always allowed."""

    n: int | None = None
    """Length of the list; None: one number."""
    of: str = "token"
    """What an element of the list is the reward of: a token of the response, or a response of the item."""
    gaps: bool = False
    """Whether an element of the list may be None."""

    def __str__(self) -> str:
        if self.n is None:
            return "float | None"
        where = "of the response" if self.of == "token" else "in the same order"
        number = "numbers or None" if self.gaps else "numbers"
        return f"a list of {self.n} {number} (one per {self.of} {where}) | None"


ONE = Expected()


def as_answer(value: Any, expected: Expected) -> Answer:
    """Convert the return value of a reward function to what is expected, or to a failure."""
    return as_number(value) if expected.n is None else as_numbers(value, expected)


def as_numbers(value: Any, expected: Expected) -> Answer:
    """Convert a list, a tuple, or a vector of numpy or torch to finite numbers, one per element."""
    if value is None:
        return None
    found = value.tolist() if getattr(value, "ndim", None) == 1 else value
    if not isinstance(found, list | tuple):
        return _nonsense(value, "is not a list", str(expected))
    if len(found) != expected.n:
        return _nonsense(value, f"has {len(found)} elements", str(expected))
    numbers: list[float | None] = []
    for place, one in enumerate(found):
        number = as_number(one)
        if isinstance(number, Problem) or (number is None and not expected.gaps):
            why = f"holds {one!r} for {expected.of} {place}, no number finite in float32"
            return _nonsense(value, why, str(expected))
        numbers.append(number)
    return numbers


def as_number(value: Any) -> float | Problem | None:
    """Convert a number, or a scalar of numpy or torch, to a float that is finite in float32."""
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


def checked_answers(found: object, expected: Sequence[Expected]) -> list[Answer] | None:
    """Check what a worker returned for a chunk, since a reward function can change the code of its worker.

    Args:
        found: value that the worker returned. Not trusted, so no method of it is called.
        expected: expected answer to each item of the chunk.

    Returns:
        The answers to the first items of the chunk, at least one; invalid ones are failures. None if `found` is no
        list of answers.
    """
    if type(found) is not list or not 0 < len(found) <= len(expected):
        return None
    return [_checked(one, wanted) for one, wanted in zip(found, expected, strict=False)]


def _checked(found: Any, wanted: Expected) -> Answer:
    if found is None:
        return None
    if type(found) is Problem:
        fields = vars(found)  # a forged object can lack a field, or contain another type
        kind, message = fields.get("kind"), fields.get("message")
        if type(kind) is FailureKind and type(message) is str:
            return Problem(kind, message)
    elif wanted.n is None:
        if _is_reward(found):
            return float(found)
    elif type(found) is list and len(found) == wanted.n and all(_is_reward(x) or _is_gap(x, wanted) for x in found):
        return list(found)
    expected = "one finite number" if wanted.n is None else f"a list of {wanted.n} finite numbers"
    return Problem(
        FailureKind.nonsense,
        f"the worker returned an invalid answer ({type(found).__name__}); expected {expected}. The reward function "
        "probably changes modules of realign.",
    )


def _is_gap(value: object, wanted: Expected) -> bool:
    return value is None and wanted.gaps


def _is_reward(value: object) -> bool:
    return type(value) is float and abs(value) <= _LARGEST

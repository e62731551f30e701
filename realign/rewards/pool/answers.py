"""Answers of reward workers: rewards or failures, made by a worker and checked again by the process that reads them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from numbers import Real
from typing import Any, TypeAlias

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


Answer: TypeAlias = float | list[float] | Problem | None


def as_numbers(value: Any, n: int) -> Answer:
    """Convert a list, a tuple, or a vector of numpy or torch to `n` finite numbers."""
    if value is None:
        return None
    expected = f"a list of {n} numbers (one per token of the response) | None"
    found = value.tolist() if getattr(value, "ndim", None) == 1 else value
    if not isinstance(found, list | tuple):
        return _nonsense(value, "is not a list", expected)
    if len(found) != n:
        return _nonsense(value, f"has {len(found)} elements", expected)
    numbers = [as_number(x) for x in found]
    if bad := [i for i, x in enumerate(numbers) if not isinstance(x, float)]:
        return _nonsense(value, f"holds {found[bad[0]]!r} for token {bad[0]}, no number finite in float32", expected)
    return [x for x in numbers if isinstance(x, float)]


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


def checked_answers(found: object, tokens: Sequence[int | None]) -> list[Answer] | None:
    """Check what a worker returned for a chunk, since a reward function can change the code of its worker.

    Args:
        found: value that the worker returned. Not trusted, so no method of it is called.
        tokens: number of tokens of each item of the chunk; None for items with a single reward.

    Returns:
        The answers to the first items of the chunk, at least one; invalid ones are failures. None if `found` is no
        list of answers.
    """
    if type(found) is not list or not 0 < len(found) <= len(tokens):
        return None
    return [_checked(one, n) for one, n in zip(found, tokens, strict=False)]


def _checked(found: Any, n: int | None) -> Answer:
    if found is None:
        return None
    if type(found) is Problem:
        fields = vars(found)  # a forged object can lack a field, or contain another type
        kind, message = fields.get("kind"), fields.get("message")
        if type(kind) is FailureKind and type(message) is str:
            return Problem(kind, message)
    elif n is None:
        if _is_reward(found):
            return float(found)
    elif type(found) is list and len(found) == n and all(map(_is_reward, found)):
        return list(found)
    expected = "one finite number" if n is None else f"a list of {n} finite numbers"
    return Problem(
        FailureKind.nonsense,
        f"the worker returned an invalid answer ({type(found).__name__}); expected {expected}. The reward function "
        "probably changes modules of realign.",
    )


def _is_reward(value: object) -> bool:
    return type(value) is float and abs(value) <= _LARGEST

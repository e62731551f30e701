"""Checks of values, of which the schema of a checkpoint is composed.

A check is a function of a value and its path, which raises `Mismatch` if the value does not fit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from realign.engines.distributed.sharding import Saved
from realign.errors import CheckpointError

Check: TypeAlias = Callable[[Any, str], None]
"""Raises `Mismatch` if a value does not fit; the second argument is the path of the value."""

LARGEST = 10**12
"""Upper bound of every count in a checkpoint."""

DEPTH = 50
"""Levels of nested values in a checkpoint."""


class Mismatch(CheckpointError):
    """A value of a checkpoint that no run writes. The message names its path."""

    def __init__(self, path: str, value: Any, expected: str) -> None:
        """Describe a value at `path` that is not what the schema expects."""
        super().__init__(
            f"{path}={_shown(value)} in the checkpoint: expected {expected}. The checkpoint was changed. Resume from "
            "another one."
        )


def _shown(value: Any) -> str:
    shown = "a tensor" if isinstance(value, Tensor) else " ".join(repr(value).split())
    return shown if len(shown) <= 80 else f"{shown[:80]}..."


def whole(lowest: int = 0, highest: int = LARGEST) -> Check:
    """Expect an integer in a range."""

    def check(value: Any, path: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
            raise Mismatch(path, value, f"an integer from {lowest} to {highest}")

    return check


def number(lowest: float = -math.inf, *, finite: bool = True) -> Check:
    """Expect a number of at least `lowest`. NaN and infinities are valid only without `finite`."""

    def check(value: Any, path: str) -> None:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        if not fits or (isinstance(value, int) and abs(value) > LARGEST):
            raise Mismatch(path, value, "a number")
        if finite and not (math.isfinite(value) and value >= lowest):
            raise Mismatch(path, value, "a finite number" + (f" of at least {lowest:g}" if lowest > -math.inf else ""))

    return check


def text(pattern: str | None = None, expected: str = "text") -> Check:
    """Expect text that matches a pattern as a whole."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, str) or (pattern is not None and not re.fullmatch(pattern, value)):
            raise Mismatch(path, value, expected)

    return check


def flag(value: Any, path: str) -> None:
    """Expect true or false."""
    if not isinstance(value, bool):
        raise Mismatch(path, value, "true or false")


def tensor(value: Any, path: str) -> None:
    """Expect a tensor, which may be sharded across ranks."""
    if not isinstance(value, Tensor | Saved):
        raise Mismatch(path, value, "a tensor")


def optional(inner: Check) -> Check:
    """Expect null or a value that fits `inner`."""

    def check(value: Any, path: str) -> None:
        if value is not None:
            inner(value, path)

    return check


def one_of(*choices: Check, expected: str) -> Check:
    """Expect a value that fits one of several checks."""

    def check(value: Any, path: str) -> None:
        for choice in choices:
            try:
                return choice(value, path)
            except Mismatch:
                continue
        raise Mismatch(path, value, expected)

    return check


def items(inner: Check, length: int | None = None) -> Check:
    """Expect a list or tuple of values that fit `inner`. The messages use the path of the list."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, list | tuple) or (length is not None and len(value) != length):
            raise Mismatch(path, value, "a list" + ("" if length is None else f" of {length} values"))
        for item in value:
            inner(item, path)

    return check


def row(*columns: Check) -> Check:
    """Expect a list or tuple with one value for each check."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, list | tuple) or len(value) != len(columns):
            raise Mismatch(path, value, f"a list of {len(columns)} values")
        for column, item in zip(columns, value, strict=True):
            column(item, path)

    return check


def mapping(inner: Check, keys: Check | None = None) -> Check:
    """Expect a mapping whose values fit `inner` and whose keys fit `keys` (text)."""
    of_key = keys or text()

    def check(value: Any, path: str) -> None:
        if not isinstance(value, Mapping):
            raise Mismatch(path, value, "a mapping")
        for key, item in value.items():
            of_key(key, f"a key of {path}")
            inner(item, f"{path}.{key}")

    return check


@dataclass(frozen=True)
class Record:
    """Expect a mapping with fixed keys. Calling it checks a value."""

    required: Mapping[str, Check]
    """Check of each key that must exist."""
    optional: Mapping[str, Check]
    """Check of each key that earlier versions, or some kinds of runs, do not write."""
    known_only: bool = True
    """Whether other keys are an error."""

    def __call__(self, value: Any, path: str) -> None:
        """Raise `Mismatch` if a value does not fit."""
        if not isinstance(value, Mapping):
            raise Mismatch(path, value, "a mapping")
        known = {**self.required, **self.optional}
        missing = self.required.keys() - value.keys()
        if missing or (self.known_only and value.keys() - known.keys()):
            wanted = ", ".join(known)
            raise Mismatch(path, sorted(map(str, value)), f"only {wanted}" if not missing else f"the keys {wanted}")
        for key, item in value.items():
            if key in known:
                known[key](item, f"{path}.{key}" if path else str(key))


def record(
    required: Mapping[str, Check] | None = None, /, *, known_only: bool = True, **optional_keys: Check
) -> Record:
    """Expect a mapping with required and optional keys."""
    return Record(required or {}, optional_keys, known_only)


def plain(*, tensors: bool) -> Check:
    """Expect nested plain values: null, flags, numbers, text, lists and mappings, and tensors if `tensors` is true."""

    def check(value: Any, path: str, depth: int = 0) -> None:
        if depth > DEPTH:
            raise CheckpointError(f"{path[:80]}... in the checkpoint: more than {DEPTH} nested levels.")
        if isinstance(value, Mapping):
            if len({type(key) for key in value}) > 1:
                raise Mismatch(path, sorted(map(str, value)), "keys of one type")
            for key, item in value.items():
                check(item, f"{path}.{key}", depth + 1)
        elif isinstance(value, list | tuple):
            for item in value:
                check(item, path, depth + 1)
        elif isinstance(value, Tensor | Saved) and not tensors:
            raise Mismatch(path, value, "plain values")

    return check

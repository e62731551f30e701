"""Validation of the parts of a `SequenceSample`. The messages name the key and the id."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from realign.api.lengths import IntArray, Lengths, as_integers
from realign.api.packing import some


def checked_ids(ids: Iterable[Hashable]) -> tuple[Hashable, ...]:
    """Return the ids as a tuple.

    Raises:
        ValueError: an id is not hashable, or occurs twice.
    """
    ids = tuple(ids)
    try:
        if len(set(ids)) == len(ids):
            return ids
    except TypeError as error:
        raise ValueError(f"ids must be hashable, such as text or numbers ({error}). Found {some(ids)}") from error
    repeated, times = Counter(ids).most_common(1)[0]
    raise ValueError(f"Duplicate id {repeated!r} ({times} occurrences). Ids must be unique")


def checked_objects(key: str, values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the metadata of a key as a tuple with one object per prompt.

    Raises:
        ValueError: `values` is not a sequence of objects.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise ValueError(f"metadata {key!r} must be a list with one object per prompt, found {type(values).__name__}")
    return tuple(values)


def check_packed(key: str, x: object, lengths: object, ids: Sequence[Hashable]) -> None:
    """Check that a packed tensor has the rows that its lengths state for these ids.

    Raises:
        ValueError: it is not a packed tensor, or the numbers of prompts or rows differ.
    """
    if not isinstance(x, Tensor) or not x.ndim:
        found = "a tensor without dimensions" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"key {key!r} must be a packed tensor, found {found}")
    if not isinstance(lengths, Lengths):
        raise ValueError(f"the lengths of key {key!r} must be Lengths, found {type(lengths).__name__}")
    if len(lengths.counts) != len(ids):
        raise ValueError(f"key {key!r} has lengths of {len(lengths.counts)} prompts, expected {len(ids)} (ids)")
    if (rows := len(x)) != lengths.total:
        ends = lengths.starts[lengths.sequence_starts[1:]]
        first = int(np.searchsorted(ends, rows, side="right")) if rows < lengths.total else len(ids) - 1
        where = f". Id {ids[first]!r} should end at row {int(ends[first])}" if ids else ""
        raise ValueError(f"key {key!r} has {rows} rows, but its lengths sum to {lengths.total}{where}")


def checked_indices(name: str, values: object, n: int) -> IntArray:
    """Return indices as an array.

    Raises:
        ValueError: an index is not an integer from 0 to `n - 1`.
    """
    chosen = as_integers(name, values)
    if chosen.size and (chosen.min() < 0 or chosen.max() >= n):
        raise ValueError(f"{name} must be indices from 0 to {n - 1}, found {chosen.min()} to {chosen.max()}")
    return chosen

"""`Lengths`: the lengths of the sequences of each prompt in a packed tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, repr=False)
class Lengths:
    """The immutable lengths of the sequences of each prompt, in the order of a packed tensor.

    Attributes:
        counts: [n_prompts] number of sequences of each prompt.
        flat: [S] number of elements (rows of the packed tensor) of each sequence, in prompt order.

    Raises:
        ValueError: a value is negative or not an integer, or `counts` does not sum to the length of `flat`.
    """

    counts: IntArray
    flat: IntArray

    def __post_init__(self) -> None:
        for name in ("counts", "flat"):
            array = as_integers(f"Lengths.{name}", getattr(self, name))
            if array.size and array.min() < 0:
                raise ValueError(f"Lengths.{name} must not be negative, found {array.min()} at {array.argmin()}")
            object.__setattr__(self, name, _read_only(array.copy() if array.flags.writeable else array))
        if (n := _total(self.counts)) != len(self.flat):
            raise ValueError(f"Lengths: counts sum to {n} sequences, but flat has {len(self.flat)}")
        if (rows := _total(self.flat)) > _MOST:
            raise ValueError(f"Lengths: flat sums to {rows} rows, which exceeds int64")

    def __reduce__(self) -> tuple[type[Lengths], tuple[IntArray, IntArray]]:
        return Lengths, (self.counts, self.flat)  # rebuilds it, since a copied array would be writable

    def __repr__(self) -> str:
        return f"Lengths({len(self.counts)} prompts, {len(self.flat)} sequences, {self.total} rows)"

    @classmethod
    def of(cls, nested: Iterable[Iterable[int]]) -> Lengths:
        """Build from one list of sequence lengths per prompt, such as `[[3, 4], [5]]`."""
        per_prompt = [list(lengths) for lengths in nested]
        counts = np.array([len(lengths) for lengths in per_prompt], dtype=np.int64)
        return cls(counts, np.array([n for lengths in per_prompt for n in lengths]))

    @classmethod
    def join(cls, parts: Sequence[Lengths]) -> Lengths:
        """Return the lengths of the concatenation of several packed tensors."""
        return cls(np.concatenate([p.counts for p in parts]), np.concatenate([p.flat for p in parts]))

    def ones(self) -> Lengths:
        """Return the lengths of a key with one element per sequence."""
        return Lengths(self.counts, np.ones_like(self.flat))

    @cached_property
    def total(self) -> int:
        """Number of rows of the packed tensor."""
        return int(self.flat.sum())

    @cached_property
    def starts(self) -> IntArray:
        """[S + 1] first row of each sequence, and the total."""
        return _cumulative(self.flat)

    @cached_property
    def sequence_starts(self) -> IntArray:
        """[n_prompts + 1] index of each prompt's first sequence, and the number of sequences."""
        return _cumulative(self.counts)

    @cached_property
    def per_prompt(self) -> IntArray:
        """[n_prompts] number of rows of each prompt, over all its sequences."""
        return _read_only(np.diff(self.starts[self.sequence_starts]))

    @cached_property
    def prompt_of_sequence(self) -> IntArray:
        """[S] index of the prompt of each sequence."""
        return _read_only(np.repeat(np.arange(len(self.counts)), self.counts))

    def nested(self) -> tuple[tuple[int, ...], ...]:
        """Return one tuple of lengths per prompt."""
        flat, bounds = self.flat.tolist(), self.sequence_starts.tolist()
        return tuple(tuple(flat[a:b]) for a, b in pairwise(bounds))

    def same_sequences(self, other: Lengths) -> bool:
        """Return whether both have the same number of sequences for every prompt."""
        return self is other or np.array_equal(self.counts, other.counts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Lengths):
            return NotImplemented
        return self is other or (np.array_equal(self.counts, other.counts) and np.array_equal(self.flat, other.flat))

    __hash__ = None  # type: ignore[assignment]

    def between(self, start: int, stop: int) -> Lengths:
        """Return the lengths of the prompts from `start` up to (excluding) `stop`."""
        first, last = self.sequence_starts[[start, stop]].tolist()
        return Lengths(self.counts[start:stop], self.flat[first:last])

    def sequences_of(self, prompts: IntArray) -> tuple[IntArray, IntArray]:
        """Return the indices of all sequences of these prompts (in this order), and the number per prompt."""
        counts = self.counts[prompts]
        shift = self.sequence_starts[:-1][prompts] - _cumulative(counts)[:-1]
        return np.arange(int(counts.sum())) + np.repeat(shift, counts), counts

    def take(self, sequences: IntArray, counts: IntArray) -> Lengths:
        """Return the lengths of the selected `sequences` (indices, any order), with `counts` of them per prompt."""
        return Lengths(counts, self.flat[sequences])

    def rows(self, sequences: IntArray) -> Rows:
        """Return the rows of the selected sequences (indices, any order), for `pick`."""
        if not len(sequences):
            return [slice(0, 0)]
        breaks = np.flatnonzero(np.diff(sequences) != 1) + 1
        lengths = self.flat[sequences]
        if (len(breaks) + 1) * _RUN <= int(lengths.sum()) or not len(breaks):
            first = self.starts[sequences[np.concatenate([[0], breaks])]]
            last = self.starts[1:][sequences[np.concatenate([breaks - 1, [len(sequences) - 1]])]]
            return [slice(a, b) for a, b in zip(first.tolist(), last.tolist(), strict=True)]
        shift = self.starts[:-1][sequences] - _cumulative(lengths)[:-1]
        return torch.from_numpy(np.arange(int(lengths.sum())) + np.repeat(shift, lengths))


_MOST = int(np.iinfo(np.int64).max)
# Mean rows per run of adjacent sequences above which copying runs is faster than indexing rows (measured on CPU).
_RUN = 64
Rows: TypeAlias = list[slice] | Tensor


def as_integers(name: str, values: object) -> IntArray:
    """Convert to a 1-D int64 array. Rejects values that numpy would silently convert: floats, bools, overflow."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:  # ragged lists, or tensors that numpy does not support
        raise ValueError(f"{name} must be a list of integers, found {type(values).__name__}: {error}") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be a list of integers, found {array.dtype} of shape {list(array.shape)}")
    if array.size and array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} must be integers below 2**63, found {array.max()}")
    return array.astype(np.int64, copy=False)


def _total(array: IntArray) -> int:
    """Sum without the integer overflow of numpy."""
    if array.size and int(array.max()) > _MOST // array.size:
        return sum(array.tolist())
    return int(array.sum())


def _cumulative(counts: IntArray) -> IntArray:
    out = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=out[1:])
    return _read_only(out)


def _read_only(array: IntArray) -> IntArray:
    array.flags.writeable = False
    return array

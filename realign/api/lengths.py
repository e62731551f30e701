"""`Lengths`: the lengths of the sequences of each prompt in a packed tensor, and ways to build one."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

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
            # A writable array belongs to the caller, who could change it later.
            object.__setattr__(self, name, _make_read_only(array.copy() if array.flags.writeable else array))
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
        return _make_read_only(np.diff(self.starts[self.sequence_starts]))

    @cached_property
    def prompt_of_sequence(self) -> IntArray:
        """[S] index of the prompt of each sequence."""
        return _make_read_only(np.repeat(np.arange(len(self.counts)), self.counts))

    def as_tuples(self) -> tuple[tuple[int, ...], ...]:
        """Return one tuple of lengths per prompt."""
        flat, bounds = self.flat.tolist(), self.sequence_starts.tolist()
        return tuple(tuple(flat[a:b]) for a, b in pairwise(bounds))

    def same_sequences(self, other: Lengths) -> bool:
        """Return whether both have the same number of sequences for every prompt."""
        # for the few sequences of a batch many times as fast as `np.array_equal`
        return self is other or self.counts.tobytes() == other.counts.tobytes()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Lengths):
            return NotImplemented
        return self is other or (self.same_sequences(other) and self.flat.tobytes() == other.flat.tobytes())

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
        # From a row's place in the result to its place in the tensor, the same for all rows of a sequence.
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
    return _make_read_only(out)


def _make_read_only(array: IntArray) -> IntArray:
    array.flags.writeable = False
    return array


_FORM = "one list per prompt, with one tensor or list per sequence"
Nested: TypeAlias = Sequence[Sequence[Tensor | Sequence[int] | Sequence[float]]]


def pack(key: str, ids: Sequence[Hashable], nested: Nested) -> tuple[Tensor, Lengths]:
    """Pack one list per prompt, with one tensor or list per sequence.

    Promotes lists of numbers to one dtype for the whole key. Tensors keep their dtype.

    Raises:
        ValueError: a value is not a sequence, or its dtype differs from the others. The message names the key and id.
    """
    if isinstance(nested, str | bytes) or not isinstance(nested, Sequence):
        raise ValueError(f"key {key!r}: found {type(nested).__name__}, expected {_FORM}")
    if len(nested) != len(ids):
        raise ValueError(f"key {key!r} has sequences of {len(nested)} prompts, expected {len(ids)} (ids)")
    tensors: list[list[Tensor]] = []
    promoted: list[Tensor] = []  # tensors made from lists, which determine the dtype of all lists
    for i, sequences in zip(ids, nested, strict=True):
        if isinstance(sequences, Tensor) or not isinstance(sequences, Sequence) or isinstance(sequences, str):
            raise _not_nested(key, i, "a list of sequences", sequences)
        tensors.append([_as_tensor(key, i, sequence) for sequence in sequences])
        promoted += [t for t, raw in zip(tensors[-1], sequences, strict=True) if not isinstance(raw, Tensor) and len(t)]
    dtypes = {t.dtype for t in promoted}
    if len(dtypes) > 1:
        dtype = functools.reduce(torch.promote_types, sorted(dtypes, key=str))
        tensors = [
            [t if isinstance(raw, Tensor) else t.to(dtype) for t, raw in zip(parts, sequences, strict=True)]
            for parts, sequences in zip(tensors, nested, strict=True)
        ]
    lengths = Lengths.of([[len(t) for t in parts] for parts in tensors])
    flat = [t for parts in tensors for t in parts]
    owners = [(i,) for i, parts in zip(ids, tensors, strict=True) for _ in parts]
    return concatenate(key, flat, owners), lengths


def concatenate(key: str, parts: Sequence[Tensor], owners: Sequence[Sequence[Hashable]]) -> Tensor:
    """Concatenate packed tensors by rows. `owners` are the ids of each part, for error messages.

    Parts without rows are skipped, since an empty list has no dtype.

    Raises:
        ValueError: two parts differ in dtype or in the dimensions after the first.
    """
    full = [(part, ids) for part, ids in zip(parts, owners, strict=True) if len(part)]
    for part, ids in full[1:]:
        if (part.dtype, part.shape[1:]) != (full[0][0].dtype, full[0][0].shape[1:]):
            raise ValueError(
                f"key {key!r} is {_kind(part)} for {some(ids)}, but {_kind(full[0][0])} for {some(full[0][1])}"
            )
    if len(full) == 1:
        return full[0][0]
    if full:
        return torch.cat([part for part, _ in full])
    return parts[0] if parts else torch.empty(0)


def pick(x: Tensor, rows: Rows) -> Tensor:
    """Select rows of a packed tensor. Returns a view if they are adjacent."""
    if isinstance(rows, Tensor):
        return x.index_select(0, rows.to(x.device))
    return x[rows[0]] if len(rows) == 1 else torch.cat([x[run] for run in rows])


def describe(x: Tensor, lengths: Lengths) -> str:
    """Format shape, dtype and lengths of a packed tensor in one line, without its content."""
    n = lengths.flat
    cut = f"{len(n)} sequences of {n.min()} to {n.max()}, mean {n.mean():.1f}" if len(n) else "no sequences"
    return f"{list(x.shape)!s:<12} {_name(x.dtype):<8} {cut}"


def some(ids: Sequence[Hashable]) -> str:
    """Format the first ids for a message."""
    return ", ".join(map(repr, ids[:3])) + (f", ... ({len(ids)} in all)" if len(ids) > 3 else "")


def _as_tensor(key: str, owner: Hashable, sequence: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(sequence)
    except (TypeError, ValueError, RuntimeError):
        tensor = None
    if tensor is None or not tensor.ndim:
        raise _not_nested(key, owner, "tensors or lists of numbers", sequence)
    return tensor


def _not_nested(key: str, owner: Hashable, expected: str, value: object) -> ValueError:
    return ValueError(f"key {key!r}, id {owner!r}: found {type(value).__name__}, expected {expected} ({_FORM})")


def _kind(x: Tensor) -> str:
    return f"{_name(x.dtype)} with rows of shape {list(x.shape[1:])}" if x.ndim > 1 else _name(x.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

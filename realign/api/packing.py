"""Build packed tensors from nested sequences, from other packed tensors, or from selected rows."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from realign.api.lengths import Lengths, Rows

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


def _not_nested(key: str, owner: Hashable, expected: str, found: object) -> ValueError:
    return ValueError(f"key {key!r}, id {owner!r}: found {type(found).__name__}, expected {expected} ({_FORM})")


def _kind(x: Tensor) -> str:
    return f"{_name(x.dtype)} with rows of shape {list(x.shape[1:])}" if x.ndim > 1 else _name(x.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

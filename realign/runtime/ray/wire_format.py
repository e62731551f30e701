"""Wire format between processes: trees whose tensors are numpy arrays, which Ray maps without a copy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from realign.api import Lengths, SequenceSample


@dataclass(frozen=True, eq=False)
class Array:
    """A tensor in the wire format."""

    data: npt.NDArray[Any]
    dtype: str
    """Name of the torch dtype. Dtypes that numpy lacks, such as bfloat16, are sent as integers with the same bits."""


@dataclass(frozen=True, eq=False)
class Batch:
    """A `SequenceSample` in the wire format."""

    ids: tuple[Hashable, ...]
    data: Mapping[str, Array]
    cuts: tuple[Lengths, ...]
    cut_of: Mapping[str, int]
    """Index into `cuts` for each key. Keys that share a lengths object share an entry, so it is sent once."""
    metadata: Mapping[str, tuple[Any, ...]]


def to_wire(tree: Any) -> Any:
    """Replace each tensor by an `Array` and each sample by a `Batch`, in mappings, lists and (named) tuples."""
    return map_tree(tree, _array, _batch)


def _batch(sample: SequenceSample) -> Batch:
    cuts = tuple({id(cut): cut for cut in sample.lengths.values()}.values())
    index = {id(cut): i for i, cut in enumerate(cuts)}
    data = {key: _array(x) for key, x in sample.data.items()}
    cut_of = {key: index[id(cut)] for key, cut in sample.lengths.items()}
    return Batch(sample.ids, data, cuts, cut_of, dict(sample.metadata))


def from_wire(tree: Any) -> Any:
    """Restore the tree that `to_wire` converted. Its tensors share the memory of the arrays and are read-only."""
    if isinstance(tree, Array):
        return _tensor(tree)
    if isinstance(tree, Batch):
        data = {key: _tensor(x) for key, x in tree.data.items()}
        lengths = {key: tree.cuts[i] for key, i in tree.cut_of.items()}
        return SequenceSample(tree.ids, data, lengths, tree.metadata)
    return _inside(tree, from_wire)


def map_tree(
    tree: Any, of_tensor: Callable[[Tensor], Any], of_sample: Callable[[SequenceSample], Any] = lambda sample: sample
) -> Any:
    """Return a copy of `tree` with `of_tensor` applied to each tensor and `of_sample` to each sample."""
    if isinstance(tree, Tensor):
        return of_tensor(tree)
    if isinstance(tree, SequenceSample):
        return of_sample(tree)
    return _inside(tree, lambda inner: map_tree(inner, of_tensor, of_sample))


def shapes_of(tree: Any) -> str:
    """Return a human-readable list of the keys and shapes of the samples in a tree."""
    if isinstance(tree, SequenceSample):
        return f"{len(tree)} prompts, " + ", ".join(f"{key} {list(x.shape)}" for key, x in tree.data.items())
    inner = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list | tuple) else ()
    return "; ".join(filter(None, map(shapes_of, inner)))


def _inside(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to the items of a mapping, list or tuple; return anything else unchanged."""
    if isinstance(tree, Mapping):
        return {key: change(value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(change, tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map(change, tree))
    return tree


def _array(x: Tensor) -> Array:
    host = x.detach().cpu().contiguous()
    name = str(x.dtype).removeprefix("torch.")
    try:
        return Array(host.numpy(), name)
    except TypeError:  # a dtype that numpy lacks
        # bfloat16 and the float8 types; a view keeps the bits
        bits = {1: torch.uint8, 2: torch.int16}[x.itemsize]
        return Array(host.view(bits).numpy(), name)


def _tensor(array: Array) -> Tensor:
    _accept_read_only()
    x = torch.from_numpy(array.data)
    dtype: torch.dtype = getattr(torch, array.dtype)
    return x if x.dtype == dtype else x.view(dtype)


@cache
def _accept_read_only() -> None:
    """Suppress torch's warning about read-only arrays, which torch emits once per process."""
    array = np.zeros(1)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(array)

"""The weight files of a saved model, into which every rank writes its slices, so that none gathers the model.

A model folder does not contain the weights of a model as they are: transformers renames some, and splits those of
experts. This conversion runs on tensors without memory. They show which part of which weight each saved tensor is.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers.core_model_loading import revert_weight_conversion
from typing_extensions import override

from realign.engines.training.weights import VALUE_HEAD
from realign.models.files.model_folder import INDEX, WEIGHTS
from realign.models.files.weight_files import Header
from realign.models.network.value_head import FILE
from realign.models.parts import is_part, slices_of
from realign.own_files import replace_text

LARGEST_FILE = "50GB"
"""Size of a file at which transformers starts another one."""

Update: TypeAlias = Callable[[], Tensor]
"""Computes what a saved weight has in addition to the weight of the model."""


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a file, and the part of a weight that it is."""

    file: str
    offset: int
    """First byte in the file."""
    shape: tuple[int, ...]
    start: tuple[int, ...]
    """First index in each dimension of the weight."""
    dims: tuple[int | None, ...]
    """Dimension of the weight that each dimension of the tensor is; None for a new one of size 1."""

    def write(self, file: int, own: Tensor, box: Sequence[slice]) -> None:
        """Write what a slice of the weight contributes to this tensor.

        Args:
            file: descriptor of the open file.
            own: the slice, on the host.
            box: its place in the weight.
        """
        sizes = {dim: n for dim, n in zip(self.dims, self.shape, strict=True) if dim is not None}
        low, high = [], []
        for dim, (start, rows) in enumerate(zip(self.start, box, strict=True)):
            low.append(max(start, rows.start))
            high.append(min(start + sizes.get(dim, 1), rows.stop))
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return
        part = own[tuple(slice(a - rows.start, b - rows.start) for a, b, rows in zip(low, high, box, strict=True))]
        dropped = [dim for dim in range(own.ndim) if dim not in sizes]
        part = part.permute([*(dim for dim in self.dims if dim is not None), *dropped])
        here = [0 if dim is None else low[dim] - self.start[dim] for dim in self.dims]
        part = part.reshape([1 if dim is None else high[dim] - low[dim] for dim in self.dims])
        self._write_box(file, part, here)

    def _write_box(self, file: int, x: Tensor, start: Sequence[int]) -> None:
        # Dimensions after `run` are complete, so that the values from there on are contiguous in the file.
        run = x.ndim - 1
        while run > 0 and x.shape[run] == self.shape[run]:
            run -= 1
        steps = [prod(self.shape[dim + 1 :]) for dim in range(x.ndim)]
        first = sum(at * step for at, step in zip(start, steps, strict=True))
        outer = x.shape[: max(run, 0)]
        rows = x.contiguous().view(prod(outer), -1).view(torch.uint8)
        for row, index in zip(rows, product(*map(range, outer)), strict=True):
            at = first + sum(i * step for i, step in zip(index, steps, strict=False))
            _write_at(file, self.offset + at * x.itemsize, row.numpy().data)


def _write_at(file: int, offset: int, content: memoryview) -> None:
    while content:
        written = os.pwrite(file, content, offset)  # at most 2 GiB of it
        content, offset = content[written:], offset + written


@dataclass(frozen=True)
class SavedFiles:
    """The files of a model's weights, and where the weights go."""

    headers: Mapping[str, Header]
    """By file name."""
    index: str | None
    """Content of the index; None for a model in one file."""
    places: Mapping[str, Sequence[SavedTensor]]
    """Saved tensors by the name of their weight."""

    def create(self, folder: Path) -> None:
        """Create the files, with disk space for all weights.

        Raises:
            OSError: there is not enough space.
        """
        for name, header in self.headers.items():
            header.create(folder / name)
        if self.index is not None:
            replace_text(folder / INDEX, self.index)

    def write(self, folder: Path, weights: Mapping[str, Tensor], updates: Mapping[str, Update]) -> None:
        """Write slices into the files that another process has created.

        Args:
            folder: the folder of the files.
            weights: this rank's slices (`DTensor`), or full weights, by name; only those that this rank writes.
            updates: added to the weights of the same name.

        Raises:
            OSError: a file cannot be written.
        """
        with ExitStack() as stack:
            opened = {}
            for name in self.headers:
                opened[name] = os.open(folder / name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                stack.callback(os.close, opened[name])
            for name, x in weights.items():
                own, box = x.detach(), [slice(0, n) for n in x.shape]
                if is_part(x):
                    own, box = x.to_local().detach(), slices_of(x)
                if name in updates:
                    update = updates[name]()[tuple(box)]
                    own = own.to(update.device) + update  # weights can be offloaded to the host
                own = own.cpu()
                for saved in self.places.get(name, ()):
                    saved.write(opened[saved.file], own, box)
            for number in opened.values():
                os.fsync(number)


def plan_files(
    module: Any,
    weights: Mapping[str, Tensor],
    names: Sequence[str],
    total: int,
    value_head: Mapping[str, Tensor] = MappingProxyType({}),
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> SavedFiles | None:
    """Return the files that transformers would save, or None if a saved tensor is more than a part of a weight.

    Args:
        module: the transformers model.
        weights: its weights, or tensors of their shapes and dtypes.
        names: names of those to save; of weights that are tied, one.
        total: number of weights of the model.
        value_head: the weights of a value head to save with the model, in a separate file; empty for none.
        metadata: metadata of that file.
    """
    traced = {name: _Traced.of(weights[name]) for name in names}
    names_by_memory = {_memory(x): name for name, x in traced.items()}
    with torch.no_grad():
        converted: dict[str, Any] = revert_weight_conversion(module, dict(traced))
    split = split_state_dict_into_shards_factory(
        converted,
        get_storage_size=lambda x: x.memory.nbytes,
        get_storage_id=lambda x: id(x.memory),
        filename_pattern=WEIGHTS.replace(".", "{suffix}."),
        max_shard_size=LARGEST_FILE,
    )
    headers: dict[str, Header] = {}
    places = defaultdict(list)
    for file, members in split.filename_to_tensors.items():
        headers[file] = Header.of({name: (converted[name].dtype, converted[name].shape) for name in members}, _FORMAT)
        for name in members:
            x = converted[name]
            weight = names_by_memory.get(_memory(x))
            where = None if weight is None else _part_of(weights[weight].shape, x)
            if weight is None or where is None:
                return None
            places[weight].append(SavedTensor(file, headers[file].offsets[name], tuple(x.shape), *where))
    index = None
    if split.is_sharded:
        content = {
            "metadata": {"total_parameters": total, **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        index = json.dumps(content, indent=2, sort_keys=True) + "\n"
    if value_head:
        headers[FILE] = Header.of({name: (x.dtype, x.shape) for name, x in value_head.items()}, metadata)
        for name, x in value_head.items():
            saved = SavedTensor(FILE, headers[FILE].offsets[name], tuple(x.shape), (0,) * x.ndim, tuple(range(x.ndim)))
            places[f"{VALUE_HEAD}{name}"].append(saved)
    return SavedFiles(headers, index, dict(places))


_FORMAT = {"format": "pt"}


@dataclass(frozen=True, eq=False)
class _Memory:
    """Memory that tensors share when transformers saves them, which writes them into one file."""

    nbytes: int


class _Traced(Tensor):
    """A tensor without values. Views of it show the part of it that they are."""

    memory: _Memory

    @staticmethod
    def of(x: Tensor) -> _Traced:
        traced: _Traced = torch.empty(x.shape, dtype=x.dtype, device="meta").as_subclass(_Traced)
        traced.memory = _Memory(traced.nbytes)
        return traced

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        first = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, _Traced))
        if func is torch.Tensor.contiguous and not first.is_contiguous():
            copy: Any = first.view_as(first)  # a copy still shows the part of the weight that it is
            copy.memory = _Memory(copy.nbytes)
            return copy
        out = super().__torch_function__(func, types, args, kwargs or {})
        for x in tree_leaves(out):
            if isinstance(x, _Traced) and not hasattr(x, "memory"):
                x.memory = first.memory if _memory(x) == _memory(first) else _Memory(x.nbytes)
        return out


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _part_of(shape: Sequence[int], x: Tensor) -> tuple[tuple[int, ...], tuple[int | None, ...]] | None:
    """Return `start` and `dims` (see `SavedTensor`) of a view of a weight; None if it merges or splits dimensions."""
    steps = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start, rest = [], int(x.storage_offset())
    for step in steps:
        at, rest = divmod(rest, max(1, step))
        start.append(at)
    dims: list[int | None] = []
    for size, stride in zip(x.shape, x.stride(), strict=True):
        fits = (
            dim
            for dim, step in enumerate(steps)
            if step == stride and start[dim] + size <= shape[dim] and dim not in dims
        )
        dims.append(next(fits, None) if size > 1 else None)
        if size > 1 and dims[-1] is None:
            return None
    return tuple(start), tuple(dims)

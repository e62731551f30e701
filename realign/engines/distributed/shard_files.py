"""Files that contain the shards of all ranks, in the format of torch's distributed checkpoints for Hugging Face files.

Nothing is pickled. The header of a file contains the offsets of its shards in the full tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from realign.models.files.weight_files import DTYPES
from realign.models.parts import is_part, slices_of, writes
from realign.ranks import Ranks, current

OFFSETS = "DCP_SHARDING_INFO"
"""Name of the offsets in the header, see `torch.distributed.checkpoint.HuggingFaceStorageReader`."""
RELEASED = 2**28
"""Bytes after which open files are closed: until then, what was read of them counts as memory of the process."""


def file_of(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def shards_to_write(tensors: Mapping[str, Tensor], ranks: Ranks) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the shards that this rank writes, and the metadata of its file."""
    shards, offsets = {}, {}
    for name, x in tensors.items():
        own, box = _own_shard(x)
        if writes(x, ranks) and (own.numel() or not x.numel()):  # more ranks than rows leave some without any
            shards[name], offsets[name] = own, {"saved_offsets": [rows.start for rows in box]}
    return shards, {"format": "pt", OFFSETS: json.dumps(offsets)}


def _own_shard(x: Tensor) -> tuple[Tensor, list[slice]]:
    """Return this rank's shard of a tensor, and its place."""
    return (x.to_local(), slices_of(x)) if is_part(x) else (x, [slice(0, n) for n in x.shape])


@dataclass(frozen=True)
class Shard:
    """A shard of a tensor in a file."""

    file: Path
    box: tuple[slice, ...]
    """Its place in the tensor."""


@dataclass(frozen=True, eq=False)
class Saved:
    """A tensor whose shards are in files."""

    name: str
    dtype: torch.dtype
    shards: Sequence[Shard]

    @property
    def shape(self) -> torch.Size:
        """Shape of the full tensor."""
        return torch.Size(max(ends) for ends in zip(*([rows.stop for rows in s.box] for s in self.shards), strict=True))

    def read(self, x: Tensor, opened: Any) -> None:
        """Fill a tensor, or this rank's shard of it; `opened` opens a safetensors file."""
        own, box = _own_shard(x)
        left = own.numel()
        for shard in self.shards:
            pairs = list(zip(box, shard.box, strict=True))
            common = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs]
            if any(rows.start >= rows.stop for rows in common):
                continue
            there = tuple(_shift(rows, of.start) for rows, of in zip(common, shard.box, strict=True))
            here = tuple(_shift(rows, of.start) for rows, of in zip(common, box, strict=True))
            part = torch.as_tensor(opened(shard.file).get_slice(self.name)[there or ...])
            own[here].copy_(part)
            left -= part.numel()
        if left > 0:
            raise ValueError(f"{self.shards[0].file.parent}: a part of {self.name!r} is missing")


def _shift(rows: slice, by: int) -> slice:
    return slice(rows.start - by, rows.stop - by)


@torch.no_grad()
def read_shards(wanted: Iterable[tuple[Saved, Tensor]]) -> None:
    """Fill tensors, or this rank's shards of them, from files that any number of ranks wrote; not a collective.

    Raises:
        ValueError: a file cannot be read, or lacks a part of a tensor.
    """
    with ExitStack() as stack:
        opened = cache(lambda file: stack.enter_context(safe_open(file, framework="pt")))
        size = 0
        for saved, x in wanted:
            if size > RELEASED:
                opened.cache_clear()
                stack.close()
                size = 0
            try:
                saved.read(x, opened)
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{saved.shards[0].file.parent}: {error}") from error
            size += (x.to_local() if is_part(x) else x).nbytes


def read_saved(folder: Path) -> dict[str, Tensor | Saved]:
    """Return all tensors of such a folder by name.

    A single process loads full tensors. With several ranks, the result contains `Saved` references.
    """
    named = {name: dtype for dtype, name in DTYPES.items()}
    # By place: a copy of a shard, which earlier versions wrote too, must not stand in for a missing one.
    shards: dict[str, dict[tuple[tuple[int, int], ...], Shard]] = {}
    dtypes = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            offsets = json.loads(opened.metadata()[OFFSETS])
            for name in opened.keys():  # noqa: SIM118  (not a mapping)
                part = opened.get_slice(name)
                starts = zip(offsets[name]["saved_offsets"], part.get_shape(), strict=True)
                place = tuple((start, start + n) for start, n in starts)
                shards.setdefault(name, {})[place] = Shard(file, tuple(slice(*rows) for rows in place))
                dtypes[name] = named[part.get_dtype()]
    saved = {name: Saved(name, dtypes[name], list(parts.values())) for name, parts in shards.items()}
    if current().size > 1:
        return dict(saved)
    tensors = {name: torch.empty(x.shape, dtype=x.dtype) for name, x in saved.items()}
    read_shards((saved[name], x) for name, x in tensors.items())
    return dict(tensors)

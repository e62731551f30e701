"""Tensors of which each rank has a part: the whole, a rank's slice, and files that hold the parts of all ranks."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from realign.engines.distributed.ranks import current

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_part(x: Tensor) -> TypeGuard[DTensor]:
    """Whether `x` is this rank's part of a tensor (a `DTensor`)."""
    return hasattr(x, "full_tensor")


def whole(x: Tensor) -> Tensor:
    """All of a tensor; of one of which each rank has a part, a collective."""
    if not is_part(x):
        return x
    from torch.distributed.tensor import Replicate

    part: Any = x
    if part.device.type != part.device_mesh.device_type:  # parts that wait on the host travel by the accelerator
        part = part.to(part.device_mesh.device_type)
    for dim in range(part.device_mesh.ndim):  # what FSDP cut last comes together first
        kept = part.placements[dim + 1 :]
        part = part.redistribute(placements=[*[Replicate()] * (dim + 1), *kept])
    found: Tensor = part.to_local()
    return found


def part_of(x: Tensor, like: DTensor) -> Tensor:
    """This rank's slice of a whole tensor, cut as `like` is: a view.

    Tensor parallel, the last dimension of a mesh, cuts first, and FSDP cuts what it leaves.
    """
    for dim in reversed(range(like.device_mesh.ndim)):
        placement: Any = like.placements[dim]
        if not placement.is_replicate():  # what tensor parallel has cut, FSDP cuts by another class of placement
            chunks = x.chunk(like.device_mesh.size(dim), placement.dim)
            rank = like.device_mesh.get_local_rank(dim)
            x = chunks[rank] if rank < len(chunks) else x.narrow(placement.dim, 0, 0)
    return x


def from_slice(own: Tensor, like: DTensor) -> DTensor:
    """A rank's slice as its part of a whole that is cut as `like` is."""
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def memory_of(x: DTensor) -> tuple[Hashable, ...]:
    """What two parts have in common if they are the same memory; so too where this rank's part has no elements."""
    own = x.to_local()
    return (own.untyped_storage()._cdata, own.storage_offset(), x.shape, x.dtype)


@dataclass(frozen=True)
class Saved:
    """A tensor in a folder of files that several ranks wrote."""

    folder: Path
    name: str


def write_parts(folder: Path, tensors: Mapping[str, Tensor]) -> list[Path]:
    """Write what each rank has of some tensors into safetensors files of a folder; a collective.

    The format is that of torch.distributed.checkpoint for Hugging Face files: each file says in its header where in the
    whole its parts belong, and nothing is pickled.

    Returns:
        The files that this rank wrote.

    Raises:
        OSError: a rank could not write.
    """
    dcp = _library()
    try:
        with _quiet():
            dcp.save(dict(tensors), storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except dcp.CheckpointException as error:  # it is no Exception
        raise OSError(f"{folder.name}: {_cause(error)}") from error
    return sorted(folder.glob(f"shard-{current().rank + 1:05d}-*.safetensors"))


def read_parts(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Fill tensors, or this rank's parts of them, from files that any number of ranks wrote; no collective.

    Raises:
        ValueError: a tensor is not in the files, or has another shape there.
    """
    dcp = _library()
    try:
        with _quiet():
            dcp.load(dict(into), storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    except dcp.CheckpointException as error:  # it is no Exception
        raise ValueError(f"{folder}: {_cause(error)}") from error


def read_saved(folder: Path) -> dict[str, Tensor | Saved]:
    """All tensors of such a folder by name: whole in one process, and to be read in parts where there are several."""
    dcp = _library()
    found = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    if current().size > 1:
        return {name: Saved(folder, name) for name in found}
    tensors = {name: torch.empty(facts.size, dtype=facts.properties.dtype) for name, facts in found.items()}
    read_parts(folder, tensors)
    return dict(tensors)


def _cause(error: Any) -> object:
    """What a rank met, of an exception of the library."""
    return next(iter(error.failures.values()))[0]


def _library() -> Any:
    """Imported only where there are such files; it declares no types."""
    from torch.distributed import checkpoint

    return checkpoint


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the notes that the library writes about every call."""
    loggers = [logging.getLogger(f"torch.distributed.checkpoint.{name}") for name in ("hf_storage", "filesystem")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one process reads alone
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)

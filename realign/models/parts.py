"""Parts of weights: a rank's shard of a full tensor, and which layers make a stage of a pipeline.

Importing this file does not import torch.distributed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn

from realign.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_part(x: Tensor) -> TypeGuard[DTensor]:
    """Return whether `x` is this rank's shard of a tensor (a `DTensor`)."""
    return hasattr(x, "full_tensor")


def whole(x: Tensor) -> Tensor:
    """Return the full tensor; for a sharded tensor this is a collective."""
    if not is_part(x):
        return x
    from torch.distributed.tensor import Replicate

    part: Any = x
    if not hasattr(part, "redistribute"):  # a tensor of one stage of a pipeline
        return part.full_tensor()
    if part.device.type != part.device_mesh.device_type:  # offloaded shards communicate through the accelerator
        part = part.to(part.device_mesh.device_type)
    for dim in range(part.device_mesh.ndim):  # gather FSDP first, since it splits last
        later_dims = part.placements[dim + 1 :]
        part = part.redistribute(placements=[*[Replicate()] * (dim + 1), *later_dims])
    local: Tensor = part.to_local()
    return local


def slices_of(like: DTensor, at: Sequence[int] | None = None) -> list[slice]:
    """Return the slices of a full tensor that a rank stores, one for each dimension.

    Tensor parallelism, the last dimension of a mesh, splits first. FSDP then splits the result. See `Mesh`.

    Args:
        like: a tensor that is sharded in the same way.
        at: place of the rank in the tensor's mesh; None means this rank.
    """
    if not _is_here(like):
        return [slice(0, 0)] * like.ndim
    mesh = like.device_mesh
    bounds = [range(n) for n in like.shape]
    for dim in reversed(range(mesh.ndim)):
        placement: Any = like.placements[dim]
        if not placement.is_replicate():  # FSDP uses a different placement class on top of tensor parallelism
            rows, rank = bounds[placement.dim], mesh.get_local_rank(dim) if at is None else at[dim]
            per_rank = -(-len(rows) // mesh.size(dim))  # as `torch.chunk` divides them
            bounds[placement.dim] = rows[rank * per_rank : (rank + 1) * per_rank]
    return [slice(rows.start, rows.stop) for rows in bounds]


def _is_here(x: Tensor) -> bool:
    """Return whether this rank may have a slice; it has none of a tensor of another stage of a pipeline."""
    return getattr(x, "part", x) is not None


def part_of(x: Tensor, like: DTensor) -> Tensor:
    """Return this rank's slice of a full tensor, sharded like `like`, as a view."""
    return x[tuple(slices_of(like))]


def from_slice(own: Tensor, like: DTensor) -> DTensor:
    """Wrap a rank's slice as its shard of a full tensor that is sharded like `like`."""
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def writes(x: Tensor, ranks: Ranks, first: int = 0) -> bool:
    """Return whether this rank writes its shard of a tensor, of which other ranks may have copies.

    Args:
        x: the tensor.
        ranks: all ranks.
        first: the first of the ranks that have weights of this stage of a pipeline.
    """
    if not is_part(x):
        return ranks.leader
    if not _is_here(x):
        return False
    mesh = x.device_mesh
    # Ranks that compute layers together each have a mesh of their own for what FSDP alone divides, such as norms. The
    # tensors on these meshes are copies, and the first rank is on the first mesh.
    on_first = bool((mesh.mesh == getattr(x, "first_rank", first)).any())
    return on_first and all(
        not at.is_replicate() or not mesh.get_local_rank(dim) for dim, at in enumerate(x.placements)
    )


def memory_of(x: DTensor) -> tuple[Hashable, ...]:
    """Return a key that is equal for two shards in the same memory, including shards without elements."""
    # The storage and not `data_ptr`, which is 0 for every shard without elements.
    own = x.to_local()
    return (own.untyped_storage()._cdata, own.storage_offset(), x.shape, x.dtype)


def divide_layers(sizes: Sequence[int], stages: int) -> list[range]:
    """Divide consecutive layers into stages of a pipeline, so that the largest stage is as small as possible.

    Args:
        sizes: number of weights of each layer. The first layer counts with the embeddings, the last one with the heads.
        stages: number of stages, at most one for each layer.
    """

    @cache
    def best(start: int, left: int) -> tuple[int, int, tuple[int, ...]]:
        """Return the largest stage, the sum of the squares of all, and their ends, of the layers from `start` on."""
        if left == 1:
            total = sum(sizes[start:])
            return total, total**2, (len(sizes),)
        options = []
        for end in range(start + 1, len(sizes) - left + 2):
            own, (largest, squares, ends) = sum(sizes[start:end]), best(end, left - 1)
            options.append((max(own, largest), own**2 + squares, (end, *ends)))
        return min(options)

    ends = best(0, stages)[2]
    return [range(start, end) for start, end in zip((0, *ends), ends, strict=False)]


def sizes_for_stages(module: Any, layers: Iterable[nn.Module]) -> list[int]:
    """Return the numbers of weights that decide which layers make a stage.

    The first layer counts with the embeddings, the last one with the head.
    """
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    for end, part in ((0, module.get_input_embeddings()), (-1, module.get_output_embeddings())):
        sizes[end] += 0 if part is None else part.weight.numel()
    return sizes

"""Test which ranks a dimension of the mesh has, with a process group without processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from realign.engines.distributed.mesh import Mesh
from realign.engines.distributed.sharding import Sharding
from realign.models.host import Host


@contextmanager
def mesh_of(sharding: Sharding, ranks: int, rank: int) -> Iterator[Mesh]:
    """Return the mesh as a rank sees it."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield Mesh.of("actor", sharding, torch.device("cpu"), Host())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("sharding", "ranks", "expected"),
    [
        (Sharding(), 4, {"data": [0, 1, 2, 3], "fsdp": [0, 1, 2, 3], "shard": [0, 1, 2, 3], "tensor": [3]}),
        (Sharding(tensor=2), 4, {"data": [1, 3], "fsdp": [1, 3], "shard": [1, 3], "tensor": [2, 3]}),
        (Sharding(replicate=2), 4, {"data": [0, 1, 2, 3], "fsdp": [0, 1, 2, 3], "shard": [2, 3], "tensor": [3]}),
        (Sharding(replicate=2, tensor=2), 8, {"data": [1, 3, 5, 7], "fsdp": [1, 3, 5, 7], "shard": [1, 3]}),
        (Sharding(context=2), 4, {"data": [1, 3], "fsdp": [0, 1, 2, 3], "shard": [0, 1, 2, 3], "context": [2, 3]}),
        (Sharding(replicate=2, context=2), 4, {"data": [1, 3], "shard": [2, 3], "context": [2, 3], "tensor": [3]}),
        (Sharding(pipeline=2), 4, {"data": [2, 3], "fsdp": [2, 3], "shard": [2, 3], "pipeline": [1, 3], "tensor": [3]}),
        (Sharding(pipeline=2, tensor=2), 4, {"data": [3], "fsdp": [3], "pipeline": [1, 3], "tensor": [2, 3]}),
        (Sharding(context=2, tensor=2), 4, {"data": [3], "shard": [1, 3], "context": [1, 3], "tensor": [2, 3]}),
    ],
)
def test_each_dimension_has_the_ranks_that_it_should(
    sharding: Sharding, ranks: int, expected: dict[str, list[int]]
) -> None:
    with mesh_of(sharding, ranks, 3) as mesh:
        assert {name: getattr(mesh, name).mesh.flatten().tolist() for name in expected} == expected
        assert mesh.data_ranks == len(expected["data"])
        assert mesh.data_rank == expected["data"].index(3)

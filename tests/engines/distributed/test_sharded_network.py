from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from realign.engines.distributed import sharded_network
from realign.engines.distributed.sharding import Sharding
from realign.engines.host import Host
from realign.errors import ConfigError


class Root(nn.Module):
    """A network of two layers, in place of a `ShardedNetwork`, which needs a process group."""

    grid = SimpleNamespace(mesh={"dp": "the data-parallel ranks"})

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def set_reduce_scatter_unused_params(self, on: bool) -> None:
        """Accept the setting of an FSDP root."""


@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize(("offload", "policy"), [(False, OffloadPolicy), (True, CPUOffloadPolicy)])
def test_layers_are_freed_after_their_forward_pass_and_slices_wait_on_the_cpu_as_the_settings_say(
    monkeypatch: pytest.MonkeyPatch, reshard: bool, offload: bool, policy: type
) -> None:
    found: list[tuple[nn.Module, bool, type]] = []

    def fully_shard(module: nn.Module, *, reshard_after_forward: bool, offload_policy: Any, **settings: Any) -> None:
        found.append((module, reshard_after_forward, type(offload_policy)))

    monkeypatch.setattr(sharded_network, "fully_shard", fully_shard)
    root: Any = Root()
    sharded_network.ShardedNetwork._shard(root, root.layers, Sharding(reshard=reshard, offload=offload), torch.float32)
    assert found == [*((layer, reshard, policy) for layer in root.layers), (root, False, policy)]


def test_the_mesh_has_a_dimension_for_the_ranks_that_split_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_network.dist, "get_world_size", lambda: 6)
    monkeypatch.setattr(sharded_network, "init_device_mesh", lambda *mesh, mesh_dim_names: (*mesh, mesh_dim_names))
    mesh: Any = sharded_network.Grid.of(Sharding(tensor_parallel=3), torch.device("cpu"), Host()).mesh
    assert mesh == ("cpu", (2, 3), ("dp", "tp"))
    with pytest.raises(ConfigError, match=r"tensor_parallel=4: must divide the number of ranks \(6\)"):
        sharded_network.Grid.of(Sharding(tensor_parallel=4), torch.device("cpu"), Host())

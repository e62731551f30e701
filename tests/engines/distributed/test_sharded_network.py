from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from realign.engines.distributed import sharded_network
from realign.engines.distributed.sharding import Sharding


class Root(nn.Module):
    """A network of two layers, in place of a `ShardedNetwork`, which needs a process group."""

    mesh = SimpleNamespace(fsdp="the ranks of FSDP")

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
    sharded_network.ShardedNetwork._shard(
        root, root.layers, [], Sharding(reshard=reshard, offload=offload), torch.float32
    )
    assert found == [*((layer, reshard, policy) for layer in root.layers), (root, False, policy)]

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from realign.engines.distributed import sharded_network
from realign.engines.distributed.sharding import Sharding
from tests.engines.distributed import scenarios
from tests.engines.distributed.run_ranks import run_ranks
from tests.tiny import save_tiny


class Root(nn.Module):
    """A network of two layers, in place of a `ShardedNetwork`, which needs a process group."""

    mesh = SimpleNamespace(fsdp="the ranks of FSDP")
    stage = None

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
    sharded: list[tuple[nn.Module, bool, type]] = []

    def fully_shard(module: nn.Module, *, reshard_after_forward: bool, offload_policy: Any, **settings: Any) -> None:
        sharded.append((module, reshard_after_forward, type(offload_policy)))

    monkeypatch.setattr(sharded_network, "fully_shard", fully_shard)
    root: Any = Root()
    sharded_network.ShardedNetwork._shard(
        root, root.layers, [], Sharding(reshard=reshard, offload=offload), torch.float32
    )
    assert sharded == [*((layer, reshard, policy) for layer in root.layers), (root, False, policy)]


@pytest.mark.parametrize(
    ("dtype", "size", "keeps"),
    [
        ("bfloat16", 2, False),
        pytest.param("bfloat16", 2, True, marks=pytest.mark.slow),
        pytest.param("float32", 4, False, marks=pytest.mark.slow),
    ],
)
def test_a_rollout_gathers_one_copy_of_the_layers_in_the_dtype_of_products(
    tmp_path: Path, dtype: str, size: int, keeps: bool
) -> None:
    save_tiny(tmp_path / "qwen3", family="qwen3", vocab_size=97, num_hidden_layers=24)
    for rank in run_ranks(2, scenarios.joined, tmp_path, dtype, keeps):
        assert rank["obstacle"] is None
        assert rank["same"] == [True, True]
        copy = 4 * rank["outer"] + size * rank["layers"] * rank["layer"]
        # Beside it, a layer in fp32 while it is gathered and joined.
        assert all(copy < peak < copy + 4 * 4 * rank["layer"] for peak in rank["peaks"])
        assert all(copy < left if keeps else left < copy / 10 for left in rank["left"])

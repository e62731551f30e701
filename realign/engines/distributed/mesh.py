"""`Mesh`: the ranks of a run as a grid, and for each dimension what its ranks divide and what they sum.

| dimension | what differs between its ranks | what they sum |
|---|---|---|
| `pipeline` | layers, with their weights | squares of gradients, gradients of tied embeddings |
| `replicate` | prompts | gradients, losses, metrics |
| `shard` | prompts, slices of weights | gradients, losses, metrics, squares of gradients |
| `context` | tokens of a micro-batch, slices of weights | gradients, results per token, squares of gradients |
| `tensor` | heads, neurons, experts and words, with their weights | within layers, squares of gradients |

The product of all dimensions is the number of ranks; `shard` is what the others leave. For the weights of experts, a
part of `shard` and all of `tensor` are one dimension instead, `expert`: its ranks have different experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from realign.engines.distributed.sharding import Sharding
from realign.models.host import Host


@dataclass(frozen=True, eq=False)
class Mesh:
    """The place of this rank among all ranks of the default process group.

    Attributes:
        slices: the ranks by the weights that they have: `pipeline`, `replicate`, `shard` (with `context`) and `tensor`.
        parts: the same ranks by the tokens that they compute: `data`, `context` and `tensor`. It is `slices` if these
            are the same groups, since each group of ranks takes memory on a GPU.
        experts: the same ranks by the experts that they have: `replicate`, `shard` and `expert`. It is `slices` if only
            ranks that compute layers together divide experts.
        device: device of the ranks' tensors.
        host: how ranks agree on numbers.
    """

    slices: DeviceMesh
    parts: DeviceMesh
    experts: DeviceMesh
    device: torch.device
    host: Host

    @classmethod
    def of(cls, role: str, sharding: Sharding, device: torch.device, host: Host) -> Mesh:
        """Build the mesh over all ranks.

        Raises:
            ConfigError: see `Sharding.sizes`.
        """
        sizes = sharding.sizes(role, dist.get_world_size())
        stages, replicate, shard, context, tensor = sizes.values()

        def grid(**sizes: int) -> DeviceMesh:
            return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

        # The last dimensions communicate most, so their ranks are neighbors, usually in one node.
        slices = grid(pipeline=stages, replicate=replicate, shard=shard * context, tensor=tensor)
        parts = experts = slices
        if replicate * context > 1:
            parts = grid(pipeline=stages, data=replicate * shard, context=context, tensor=tensor)
        if sharding.expert > 1:
            expert = sharding.expert
            experts = grid(
                pipeline=stages, replicate=replicate, shard=shard * context // expert, expert=expert * tensor
            )
        return cls(slices, parts, experts, device, host)

    @property
    def fsdp(self) -> DeviceMesh:
        """The ranks that FSDP gathers weights from and sums gradients over; two dimensions if it replicates."""
        return _fsdp(self.slices)

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """The ranks that FSDP gathers experts from, and sums their gradients over."""
        return _fsdp(self.experts)

    @property
    def expert(self) -> DeviceMesh:
        """The ranks that divide the experts of a layer."""
        return self.experts["tensor" if self.experts is self.slices else "expert"]

    @property
    def shard(self) -> DeviceMesh:
        """The ranks among which FSDP divides weights."""
        return self.slices["shard"]

    @property
    def tensor(self) -> DeviceMesh:
        """The ranks that compute each layer together."""
        return self.slices["tensor"]

    @cached_property
    def pipeline(self) -> DeviceMesh | None:
        """The ranks with the layers of different stages, for the same tokens; None if every rank has all layers."""
        return self.slices["pipeline"] if self.slices["pipeline"].size() > 1 else None

    @property
    def data(self) -> DeviceMesh:
        """The ranks with different prompts."""
        return self.parts["shard" if self.parts is self.slices else "data"]

    @cached_property
    def context(self) -> DeviceMesh | None:
        """The ranks that divide each micro-batch; None if one rank computes it."""
        divides = self.parts is not self.slices and self.parts["context"].size() > 1
        return self.parts["context"] if divides else None

    @property
    def data_ranks(self) -> int:
        """Number of parts of a batch."""
        return self.data.size()

    @property
    def data_rank(self) -> int:
        """Index of this rank's part of a batch. Ranks that divide its tokens or layers have the same part."""
        return self.data.get_local_rank()

    def sum(self, x: Tensor, over: DeviceMesh) -> Tensor:
        """Return the sum over the ranks of a dimension, such as `data`."""
        # `all_reduce` works in place, and the caller keeps its tensor.
        x = x.to(self.device, copy=True)
        dist.all_reduce(x, group=over.get_group())
        return x

    def gather(self, x: Any) -> list[Any]:
        """Return the values of the ranks with different prompts, in the order of the parts of a batch.

        Of the stages of a pipeline, the last one has the results of a pass.
        """
        if self.pipeline is not None:
            x = self.host.gather(x, self.pipeline.get_group())[-1]
        return self.host.gather(x, self.data.get_group())


def _fsdp(mesh: DeviceMesh) -> DeviceMesh:
    return mesh["shard"] if mesh["replicate"].size() == 1 else mesh["replicate", "shard"]

"""Sharded tensors: the settings, and a rank's shard of a full tensor.

Importing this file does not import torch.distributed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from realign.errors import ConfigError
from realign.settings import Auto, Count, Settings

if TYPE_CHECKING:
    from realign.models.network.trains import Trained


@dataclass
class Sharding(Settings):
    """Sharding of one model's weights over several processes; ignored in a single-process run.

    Attributes:
        pipeline: cut the layers into this many stages, each on its own ranks, which send hidden states to the next. The
            other dimensions divide the ranks of a stage.
        replicate: keep this many copies of the weights, each sharded over a group of ranks such as one machine. Only
            gradients travel between the groups (HSDP).
        context: divide each micro-batch, also within a sequence, over this many ranks, which exchange tokens for heads
            around attention. Must divide the number of attention heads.
        tensor: compute each layer on this many ranks together, each with some of its heads, neurons and experts, and
            some rows of the embeddings and the head. Must divide the numbers of heads, neurons and experts.
        expert: divide the experts of every layer over this many ranks, which have different prompts and send each
            other the tokens. Needs a mixture of experts; the other weights are sharded as without it.
        offload: keep weights, gradients and optimizer moments in host memory between uses (CUDA only).
        reshard: free a layer's gathered weights after its forward pass, and gather them again for its backward pass.
            false keeps them in between: faster, but needs memory for all layers.
        reduce_once: sum gradients over the ranks once per training step, instead of after every micro-batch. Faster
            with many micro-batches and slow links, but each rank then holds the gradients of all weights in fp32 (4
            bytes per weight) besides its part. Larger micro-batches, if they fit, are faster than this.
        keep_rollout: true | false | auto. Keep the copy of the weights that responses are sampled from between
            rollouts. auto frees it on CUDA if training or scoring wouldn't fit beside it.
        tensor_parallel: former name of `tensor`.
    """

    pipeline: Count = 1
    replicate: Count = 1
    context: Count = 1
    tensor: Count = 1
    expert: Count = 1
    offload: bool = False
    reshard: bool = True
    reduce_once: bool = False
    keep_rollout: bool | Auto = Auto.auto
    tensor_parallel: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tensor_parallel is not None:
            self.tensor, self.tensor_parallel = self.tensor_parallel, None

    def sizes(self, role: str, ranks: int) -> dict[str, int]:
        """Return the number of ranks along each dimension of the mesh, from the outermost to the innermost.

        Raises:
            ConfigError: the dimensions do not divide the number of ranks.
        """
        sizes = {"pipeline": self.pipeline, "replicate": self.replicate, "shard": 1}
        sizes |= {"context": self.context, "tensor": self.tensor}
        _check_divides(role, sizes, ranks, "ranks")
        sizes["shard"] = ranks // math.prod(sizes.values())
        if sizes["shard"] % self.expert:
            raise ConfigError(
                f"models.{role}.sharding.expert={self.expert}: must divide the number of ranks with different prompts "
                f"and weights ({sizes['shard']})"
            )
        return sizes

    def describe(self, role: str, ranks: int) -> str:
        """Return the number of ranks and their dimensions, without those of one rank; see `sizes` for errors."""
        grid = " x ".join(f"{name} {n}" for name, n in self.sizes(role, ranks).items() if n > 1)
        experts = f"; experts are divided over {self.expert * self.tensor} of them" if self.expert > 1 else ""
        return f"{ranks} ranks = {grid}{experts}"

    def check_heads(self, role: str, heads: int) -> None:
        """Check that the ranks can divide the attention heads of a model.

        Raises:
            ConfigError: they can't.
        """
        _check_divides(role, {"context": self.context, "tensor": self.tensor}, heads, "attention heads")

    @property
    def keeps_rollout(self) -> bool:
        """Whether the copy stays; true while `auto` is undecided."""
        return self.keep_rollout is not False


def check_reference(role: str, trains: Trained) -> None:
    """Check that a sharded model can compute its own start, which a `SharedModel` with branch=reference needs.

    Raises:
        ConfigError: it has no adapters.
    """
    if not trains.only_adds:
        raise ConfigError(
            f"models.{role}.trains={trains}: branch=reference of a sharded model requires trains=lora. Set "
            f"models.{role}.trains=lora, or use a separate model as the reference."
        )


def _check_divides(role: str, sizes: Mapping[str, int], whole: int, what: str) -> None:
    if whole % math.prod(sizes.values()):
        keys = " x ".join(f"{name}={n}" for name, n in sizes.items() if n > 1)
        raise ConfigError(f"models.{role}.sharding.{keys}: must divide the number of {what} ({whole})")

"""What an experiment says about dividing a network among ranks; imports no torch.distributed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Sharding:
    """How several processes divide the weights of one model; without effect in one process.

    Attributes:
        tensor_parallel: ranks that compute each layer together, each with some of its heads and neurons; the others
            divide the batch. Must divide the number of ranks, and the numbers of heads and neurons.
        offload: keep weights, gradients and moments in the memory of the host between their uses (CUDA only).
        reshard: free the gathered weights of a layer after its forward pass, and gather them again for its backward
            pass; false keeps them in between: faster, for the memory of all layers.
        keep_rollout: keep the whole copy of the weights from which responses are sampled between rollouts; false frees
            it after each.
    """

    tensor_parallel: int = 1
    offload: bool = False
    reshard: bool = True
    keep_rollout: bool = True

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1:
            raise ValueError(f"sharding.tensor_parallel must be at least 1, found {self.tensor_parallel}")

"""Settings for sharding a network over ranks; does not import torch.distributed."""

from __future__ import annotations

from dataclasses import dataclass

from realign.settings import Count, Settings


@dataclass
class Sharding(Settings):
    """Sharding of one model's weights over several processes; ignored in a single-process run.

    Attributes:
        tensor_parallel: number of ranks that compute each layer together, each with some of its heads and neurons.
            The batch is split over the resulting groups of ranks. Must divide the number of ranks, and the numbers of
            heads and neurons.
        offload: keep weights, gradients and optimizer moments in host memory between uses (CUDA only).
        reshard: free the gathered weights of a layer after its forward pass, and gather them again for its backward
            pass. false keeps them between the passes, which is faster but needs memory for all layers.
        reduce_once: sum gradients over the ranks once in each training step, after its last micro-batch, instead of
            after every micro-batch. Faster with many micro-batches and slow links, but each rank then keeps the
            gradients of all its weights in fp32: 4 bytes for each weight, in addition to its part of the gradients.
        keep_rollout: keep the full copy of the weights, from which responses are sampled, in memory between rollouts.
            false frees it after each rollout.
    """

    tensor_parallel: Count = 1
    offload: bool = False
    reshard: bool = True
    reduce_once: bool = False
    keep_rollout: bool = True

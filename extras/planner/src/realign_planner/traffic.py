"""Bytes that a rank sends in one micro-batch, for each dimension of the mesh."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from realign_planner.internals import FP32, MemoryModel


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends to the others of each dimension. It receives as many."""

    shard: float = 0.0
    """Weights of layers in the dtype of products, embeddings and head in fp32, and the sums of gradients in fp32."""
    replicate: float = 0.0
    """Sums of the gradients of this rank's slices."""
    context: float = 0.0
    """Queries, keys, values and outputs of attention, and their gradients."""
    tensor: float = 0.0
    """Sums of the outputs of layers, and of the gradients of their inputs."""
    expert: float = 0.0
    """Tokens for the experts of other ranks, their results, and the gradients of both."""
    pipeline: float = 0.0
    """Hidden states between stages, and their gradients, in fp32."""


def traffic(model: MemoryModel, ranks: int, tokens: float, *, trains: bool) -> Traffic:
    """Return the traffic of a micro-batch on one of `ranks` ranks.

    Args:
        model: the model with its mesh: the fields `pipeline`, `replicate`, `context`, `tensor` and `expert`.
        ranks: number of ranks of the mesh.
        tokens: tokens of the micro-batch, of all ranks that compute it together.
        trains: whether the pass is differentiated.
    """
    if (stages := model.pipeline) > 1:  # on average over the stages, which divide all weights and layers
        together = traffic(replace(model, pipeline=1), ranks // stages, tokens, trains=trains)
        hidden = _sent(stages) * FP32 * tokens / model.context * model.shape.hidden * (1 + trains)
        return replace(Traffic(*(sent / stages for sent in vars(together).values())), pipeline=hidden)
    whole, own = model.shape, model.shape.of_rank(model.tensor, model.expert)
    shards = ranks // model.replicate // model.tensor
    copies = shards // model.expert  # ranks among which the experts of a rank are divided
    size, passes = model.dtype.itemsize, 2 if trains and model.reshard else 1
    again, rows = trains and model.gradient_checkpointing, tokens / model.context
    dense, outside = (
        own.in_layers - own.in_experts,
        own.embeddings + whole.parameters - whole.in_layers - whole.embeddings,
    )
    gradient = FP32 * trains * whole.trained / (whole.parameters + whole.adapters)  # of each weight
    of_all = size * dense * passes + FP32 * outside + gradient * (dense + outside)
    of_experts = (size * passes + gradient) * own.in_experts
    sums = gradient * ((dense + outside) / shards + own.in_experts / copies)
    return Traffic(
        shard=_sent(shards) * of_all + _sent(copies) * of_experts,
        replicate=2 * _sent(model.replicate) * sums,
        context=_of_attention(model, rows, passes=1 + trains + again),
        tensor=_of_layers(model, rows, trains=trains, again=again),
        expert=_of_experts(model, rows, passes=1 + trains + again),
    )


def _of_attention(model: MemoryModel, rows: float, *, passes: int) -> float:
    """Return the bytes of ranks that exchange tokens for heads, and back.

    With fewer key-value heads than ranks, heads are repeated.
    """
    shape = model.shape.of_rank(model.tensor, 1)
    kv_heads = max(1, shape.keys * shape.heads // shape.queries)
    keys = math.lcm(kv_heads, model.context) // kv_heads * shape.keys
    exchanged = rows * (2 * shape.queries + 2 * keys) * shape.layers
    return _sent(model.context) * model.dtype.itemsize * exchanged * passes


def _of_layers(model: MemoryModel, rows: float, *, trains: bool, again: bool) -> float:
    """Return the bytes of ranks that compute layers together.

    Attention and a dense feed-forward layer each sum their outputs; checkpointing repeats the first of these sums. In
    the backward pass, the gradients of their inputs are summed, in fp32. The embeddings, and the gradient at the head,
    are sums over words.
    """
    shape, divided_words = model.shape, model.shape.words % model.tensor == 0
    dense = not shape.experts
    numbers = shape.layers * (model.dtype.itemsize * (1 + dense + again) + FP32 * (1 + dense) * trains)
    numbers += FP32 * divided_words * (1 + trains)
    sums = 2 * _sent(model.tensor) * rows * shape.hidden * numbers
    # Experts compute a part of the tokens on each rank, and each rank needs the results of all.
    parts = 0 if dense else rows * shape.layers * (shape.hidden * (1 + trains) + shape.experts_per_token * trains)
    return sums + _sent(model.tensor) * FP32 * parts


def _of_experts(model: MemoryModel, rows: float, *, passes: int) -> float:
    """Return the bytes of tokens on their way to experts and back, if the router has no preference."""
    shape = model.shape
    traveling = 2 * rows / model.tensor * shape.experts_per_token * shape.hidden * shape.layers
    return _sent(model.tensor * model.expert) * FP32 * traveling * passes


def _sent(ranks: int) -> float:
    """Return the fraction of a tensor that a rank sends if `ranks` ranks gather, scatter or exchange it."""
    return (ranks - 1) / ranks


__all__ = ["Traffic", "traffic"]

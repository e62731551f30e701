"""Layers of llama's kind with few operators each, for rollouts: a decode step of few rows is bound by their number.

Projections that read the same hidden states are one matrix, and the rows of queries and keys stand so that what rotary
positions turn together is neighbours: the turn is then one complex product. Scores do not change by such an order.
Residuals are added in place. `fusion` makes these layers from the modules of a model.

Shapes: N tokens, Hq query heads, Hk key-value heads, D size of a head, K inputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realign.engines.network.attention import AttentionArgs, AttentionContext
from realign.engines.sampling.kv_cache import DecodeContext


class Linear(NamedTuple):
    """A matrix product."""

    weight: Tensor
    """[outputs, K]."""
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """The product with `x` [..., K]."""
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)

    def add_to(self, x: Tensor, h: Tensor) -> Tensor:
        """`x` plus the product with `h`, in the memory of `x`."""
        if self.bias is None and x.dtype == self.weight.dtype:
            return x.addmm_(h, self.weight.t())
        return x.add_(self(h))


class RMSNorm(NamedTuple):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension of n numbers."""

    weight: Tensor
    """The weight times sqrt(n)."""
    floor: Tensor
    """sqrt(n * eps), a scalar: the length of a vector that `eps` alone stands for."""

    @classmethod
    def of(cls, weight: Tensor, eps: float) -> RMSNorm:
        """From the weight [..., n] as the module has it."""
        n = weight.shape[-1]
        return cls(weight.detach().float() * n**0.5, torch.tensor((n * eps) ** 0.5, device=weight.device))

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of `x` [..., n], in new memory."""
        return x.div(self._length(x)).mul_(self.weight)

    def in_place(self, x: Tensor) -> Tensor:
        """The same in the memory of `x`."""
        return x.div_(self._length(x)).mul_(self.weight)

    def _length(self, x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, 2, -1, True).hypot_(self.floor)


class Layer(NamedTuple):
    """One layer, ready to run."""

    attention_norm: RMSNorm
    qkv: Linear
    """Queries, keys and values, head after head."""
    heads: tuple[int, int, int]
    """Numbers of heads that are queries, keys and values."""
    qk_norm: RMSNorm | None
    """Of each query and key, [Hq + Hk, D]."""
    args: AttentionArgs
    output: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    activation: Callable[[Tensor], Tensor]
    down: Linear
    module: nn.Module


@dataclass(eq=False)
class FusedTrunk:
    """A `Trunk` of copied and joined weights, as they were when it was made."""

    embedding: Tensor
    layers: list[Layer]
    norm: RMSNorm
    turns: Tensor
    """[length, 1, D / 2] complex: the turn of each pair of numbers at each position."""

    def __call__(self, ids_N: Tensor, positions_N: Tensor, context: AttentionContext) -> Tensor:
        """See `Trunk`."""
        x_NH = F.embedding(ids_N, self.embedding)
        turns = self.turns[positions_N]
        for i, layer in enumerate(self.layers):
            layer.output.add_to(x_NH, _attention(i, layer, layer.attention_norm(x_NH), turns, context))
            gate, up = layer.gate_up(layer.mlp_norm(x_NH)).chunk(2, -1)
            layer.down.add_to(x_NH, layer.activation(gate).mul_(up))
        return self.norm(x_NH)


def _attention(i: int, layer: Layer, h_NH: Tensor, turns: Tensor, context: AttentionContext) -> Tensor:
    """What layer `i` reads at the tokens, [N, Hq * D]."""
    queries, keys, values = layer.heads
    qkv = layer.qkv(h_NH).view(len(h_NH), queries + keys + values, -1)
    qk = qkv[:, : queries + keys].float()  # a view, but in low precision, where positions are turned in fp32
    if layer.qk_norm is not None:
        layer.qk_norm.in_place(qk)
    torch.view_as_complex(qk.unflatten(-1, (-1, 2))).mul_(turns)
    qk = qk.to(qkv.dtype)
    q, k, v = qk[:, :queries], qk[:, queries:], qkv[:, queries + keys :]
    if isinstance(context, DecodeContext):
        out = context.attend_rows(i, q, k, v, layer.args)
    else:
        # copies, since a prefill keeps keys and values: they should not hold the memory of the queries, too
        q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (q, k, v))
        out = context.attend(i, layer.module, q, k, v, layer.args)
    return out.reshape(len(h_NH), -1)


def for_few_rows(weight: Tensor) -> Tensor:
    """The weight [outputs, K], on a CPU in fp32 with its columns one after the other in memory.

    The product with few rows then reads it in the order in which it stands: measured with MKL, 1.2 to 1.5 times as fast
    with 4 to 48 rows, and a whole rollout 8% faster.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return weight
    return weight.detach().t().contiguous().t()

"""Llama-style layers with few operators, for rollouts. The time of a small decode step depends on the operator count.

Projections that read the same hidden states are joined into one matrix. The rows of queries and keys are permuted so
that each rotary pair is adjacent. The rotation is then one complex product, and attention scores do not change.
Residuals are added in place. `fusion` builds these layers from the modules of a model.

Shapes: N tokens, Hq query heads, Hk key-value heads, D head size, K inputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from realign.functional.rounding import no_rounding
from realign.models.network.attention import AttentionContext
from realign.models.network.kernels import AttentionArgs, paged_kernel_works
from realign.models.network.kv_cache import DecodeContext, PagedDecodeContext


class AnyLinear(Protocol):
    """Linear layer, however its weight is stored."""

    @property
    def shape(self) -> Sequence[int]:
        """Numbers of outputs and of inputs K."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of what it returns."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Return the linear layer applied to `x` [..., K]."""
        ...

    def add_to(self, x: Tensor, h: Tensor) -> Tensor:
        """Add the linear layer applied to `h` to `x` in place."""
        ...


class Linear(NamedTuple):
    """Linear layer of torch."""

    weight: Tensor
    """[outputs, K]."""
    bias: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> Linear:
        """Return the layer with the weight stored for few rows."""
        return cls(for_few_rows(weight), bias)

    @property
    def shape(self) -> Sequence[int]:
        """See `AnyLinear`."""
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        """See `AnyLinear`."""
        return self.weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """See `AnyLinear`."""
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)

    def add_to(self, x: Tensor, h: Tensor) -> Tensor:
        """See `AnyLinear`."""
        if self.bias is None and x.dtype == self.weight.dtype:
            return x.addmm_(h, self.weight.t())
        if self.bias is None and _adds_in_fp32(x.device, self.weight.dtype):
            return torch.addmm(x, h.to(self.weight.dtype), self.weight.t(), out_dtype=x.dtype, out=x)
        return x.add_(self(h))


@cache
def _adds_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether one kernel adds a product in half precision to an fp32 matrix; such a sum is also more exact."""
    if device.type != "cuda":
        return False
    x, ones = torch.ones(8, 8, device=device), torch.ones(8, 8, device=device, dtype=dtype)
    try:
        torch.addmm(x, ones, ones, out_dtype=torch.float32, out=x)
    except (RuntimeError, TypeError):  # another version of torch, or a device without this kernel
        return False
    return bool((x == 9).all())


class RMSNorm(NamedTuple):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension, of size n.

    On a CPU it is computed as x / hypot(|x|, sqrt(n * eps)) * sqrt(n) * weight, which takes four operators.
    """

    weight: Tensor
    """Weight of the module; on a CPU, times sqrt(n)."""
    floor: Tensor
    """sqrt(n * eps), a scalar; `eps` expressed as a vector length."""
    eps: float

    @classmethod
    def of(cls, weight: Tensor, eps: float) -> RMSNorm:
        """Build the norm from the weight [..., n] of the original module."""
        n, weight = weight.shape[-1], weight.detach().float()
        floor = torch.tensor((n * eps) ** 0.5, device="cpu" if weight.is_cuda else weight.device)
        return cls(weight if weight.is_cuda else weight * n**0.5, floor, eps)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalized `x` [..., n] in new memory."""
        if x.is_cuda:  # one kernel there; on a CPU torch has none, and the operators below are fewer
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return x.div(self._length(x)).mul_(self.weight)

    def of_heads(self, x: Tensor) -> Tensor:
        """Return the normalized `x` [..., n] with a weight for each head; `x` may change."""
        if x.is_cuda:  # the kernel takes one weight for all heads, but queries and keys have different ones
            return F.rms_norm(x, x.shape[-1:], None, self.eps).mul_(self.weight)
        return x.div_(self._length(x)).mul_(self.weight)

    def _length(self, x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, 2, -1, True).hypot_(self.floor)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU in its approximation by tanh."""
    return F.gelu(x, approximate="tanh")


class FusedLayer(NamedTuple):
    """One decoder layer."""

    attention_norm: RMSNorm
    qkv: AnyLinear
    """Joined projection to queries, keys and values, head by head."""
    heads: tuple[int, int]
    """Numbers of query heads and of key-value heads."""
    qk_norm: RMSNorm | None
    """Norm of each query and key, [Hq + Hk, D]."""
    args: AttentionArgs
    output: AnyLinear
    mlp_norm: RMSNorm
    gate_up: AnyLinear
    activation: Callable[[Tensor], Tensor]
    down: AnyLinear
    added_norms: tuple[RMSNorm, RMSNorm] | None = None
    """Norms of what attention and MLP add to the residual stream (Gemma 3)."""
    rotation: int = 0
    """Index in `FusedTrunk.turns`."""

    def add_to(self, x_NH: Tensor, index: int, turns: Tensor, context: AttentionContext) -> None:
        """Apply this layer, the one with this index, to the residual stream in place."""
        mixed = _attention(index, self, self.attention_norm(x_NH), turns[self.rotation], context)
        self._add(self.output, mixed, x_NH, 0)
        gate, up = self.gate_up(self.mlp_norm(x_NH)).chunk(2, -1)
        self._add(self.down, self.activation(gate).mul_(up), x_NH, 1)

    def _add(self, linear: AnyLinear, h: Tensor, x_NH: Tensor, which: int) -> None:
        if self.added_norms is None:
            linear.add_to(x_NH, h)
        else:
            x_NH.add_(self.added_norms[which](linear(h).float()))


@dataclass(eq=False)
class FusedTrunk:
    """A `Trunk` over copied and joined weights, a snapshot from its construction."""

    embedding: Tensor
    layers: list[FusedLayer]
    norm: RMSNorm
    turns: Tensor
    """[kinds, length, 1, D / 2] complex: rotation of each rotary pair at each position, for each kind of layers."""
    rounded: bool = False
    """Whether the weights of the layers are exact in bf16, see `realign.functional.rounding`."""
    scale: float = 1.0
    """Factor of the embeddings."""

    @property
    def runs_paged(self) -> bool:
        """Whether a kernel of the device attends to keys and values in pages, for all layers."""
        dtype, device = self.layers[0].qkv.dtype, self.embedding.device
        sizes = {(*layer.heads, 2 * self.turns.shape[-1]) for layer in self.layers}
        return all(
            paged_kernel_works(device, dtype, heads, args)
            for heads in sizes
            for args in {layer.args for layer in self.layers}
        )

    def __call__(self, ids_N: Tensor, positions_N: Tensor, context: AttentionContext) -> Tensor:
        """See `Trunk`."""
        x_NH = F.embedding(ids_N, self.embedding)  # a copy, to which the layers add in place
        if self.scale != 1:
            x_NH.mul_(self.scale)
        turns = self.turns[:, positions_N]
        with no_rounding():  # the copies are rounded already, except for merged adapters
            for i, layer in enumerate(self.layers):
                layer.add_to(x_NH, i, turns, context)
        return self.norm(x_NH)


def _attention(i: int, layer: FusedLayer, h_NH: Tensor, turns: Tensor, context: AttentionContext) -> Tensor:
    """Return the attention output of layer `i`, [N, Hq * D], before the output projection."""
    queries, keys = layer.heads
    qkv = layer.qkv(h_NH).view(len(h_NH), queries + 2 * keys, -1)
    given = qkv[:, : queries + keys]
    qk = given.float()  # a view, except in low precision: rotation is in fp32
    if layer.qk_norm is not None:
        qk = layer.qk_norm.of_heads(qk)
    torch.view_as_complex(qk.unflatten(-1, (-1, 2))).mul_(turns)
    if qk.data_ptr() != given.data_ptr():
        given.copy_(qk)
    q, k, v = qkv.split((queries, keys, keys), 1)
    if isinstance(context, PagedDecodeContext):
        out = context.attend_joined(i, q, qkv[:, queries:], layer.args)
    elif isinstance(context, DecodeContext):
        out = context.attend_rows(i, q, k, v, layer.args)
    else:
        # copies: a prefill stores keys and values, and views would also keep the memory of the queries alive
        q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (q, k, v))
        out = context.attend(i, q, k, v, layer.args)
    return out.reshape(len(h_NH), -1)


def for_few_rows(weight: Tensor) -> Tensor:
    """Return the weight [outputs, K], stored column by column if it is fp32 on a CPU.

    Products with few rows then read it in memory order: 1.2 to 1.5 times as fast with 4 to 48 rows (MKL).
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return weight
    return weight.detach().t().contiguous().t()

"""Context parallelism: several ranks divide the rows of a pass (Ulysses, arXiv:2309.14509).

A rank computes embeddings, norms, feed-forward layers and heads for its rows only. Around attention, the ranks exchange
rows for heads: each then has all rows of the whole packed batch, for some of the heads, and so attends as one process
would. Nothing else in a decoder mixes rows, which `probe_divided` verifies for a family.

Shapes: n rows of a rank, R = C x n rows of all C ranks, Hq query heads, Hk key-value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from realign.errors import ConfigError
from realign.models.network.attention import PackedContext
from realign.models.network.kernels import AttentionArgs
from realign.models.network.recurrence import RowsForward


@dataclass(frozen=True, eq=False)
class Ulysses:
    """An `AttentionContext` for the rows of one rank.

    Attributes:
        packed: which of the R rows attend to each other.
        group: the ranks.
    """

    packed: PackedContext
    group: dist.ProcessGroup

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
        """Attend from q [1, Hq, n, D] to k, v [1, Hk, n, D] of all ranks; return [1, n, Hq, D].

        Raises:
            ConfigError: the number of ranks does not divide the number of query heads.
        """
        ranks, queries, keys = self.group.size(), q.shape[1], k.shape[1]
        if queries % ranks:
            raise ConfigError(f"must divide the number of attention heads ({queries})")
        if args.sinks_H is not None:
            args = args._replace(sinks_H=args.sinks_H.chunk(ranks)[self.group.rank()])
        # Each rank needs the keys and values of its query heads: fewer key-value heads than ranks are repeated.
        shared = queries // keys
        repeats = next(n for n in range(1, shared + 1) if shared % n == 0 and keys * n % ranks == 0)
        k, v = (x if repeats == 1 else x.repeat_interleave(repeats, 1) for x in (k, v))
        q, k, v = (self._swap(x) for x in (q, k, v))
        out = self.packed.attend(layer, q, k, v, args)
        return self._swap(out)

    def recur(self, layer: int, forward: RowsForward, hidden_TH: Tensor) -> Tensor:
        """Refuse a recurrent layer, which carries a state from row to row.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("the model has recurrent layers, which need whole sequences. Remove this key.")

    def _swap(self, x: Tensor) -> Tensor:
        """Exchange the n rows of all heads, [1, H, n, D], for all rows of this rank's heads, [1, H / C, R, D], or back.

        Back, the rows come first: [1, R, H / C, D] becomes [1, n, H, D].
        """
        sent = x[0].unflatten(0, (self.group.size(), -1))
        return exchange(sent, self.group).transpose(0, 1).flatten(1, 2)[None]


def exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the parts that the ranks have for this rank; x[i] goes to rank i. Differentiable; collective."""
    result: Tensor = _Exchange.apply(x, group)
    return result


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the ranks; collective. The gradient of x is that of this rank's result.

    It is right if every rank computes the same loss from the sum, and the gradients of all ranks are added.
    """
    result: Tensor = _Sum.apply(x, group)
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return exchange(gradients[0], ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)  # `all_reduce` works in place
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None

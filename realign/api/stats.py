"""Numbers that can be merged: how a metric travels from a micro-batch to the screen without changing its meaning.

A loss states each metric as a sum and its own count (or as an extreme); whoever cuts the batch adds them up. The mean
is taken once, at the end, so a metric does not depend on micro-batching, packing order or the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


class Mean(NamedTuple):
    """A weighted mean, kept as its two sums (0-d tensors); merged by adding both."""

    total: Tensor
    weight: Tensor


class Max(NamedTuple):
    """A largest value (0-d tensor); merged by taking the larger one."""

    value: Tensor


class Min(NamedTuple):
    """A smallest value (0-d tensor); merged by taking the smaller one."""

    value: Tensor


Stat: TypeAlias = Mean | Max | Min
Stats: TypeAlias = dict[str, Stat]


def masked_mean(x: Tensor, mask: Tensor) -> Mean:
    """The `Mean` of `x` [N] where `mask` [N] bool holds; what stands elsewhere, NaN included, has no effect."""
    return Mean(torch.where(mask, x, 0).sum(dtype=torch.float32).detach(), mask.sum())


def masked_max(x: Tensor, mask: Tensor) -> Max:
    """The `Max` of `x` [N] where `mask` [N] bool holds; -inf (left out of the report) when it holds nowhere."""
    floor = torch.full((1,), -torch.inf, device=x.device)
    return Max(torch.cat([floor, torch.where(mask, x.detach().float(), -torch.inf)]).max())


def merge_stats(parts: Iterable[Mapping[str, Stat]]) -> Stats:
    """Merge the metrics of several micro-batches, mini-batches or ranks into one.

    Args:
        parts: metrics by name. A name may be absent from some parts; where present it has one kind.

    Raises:
        ValueError: a name has two kinds.
    """
    merged: Stats = {}
    for part in parts:
        for name, raw in part.items():
            stat = raw if isinstance(raw, Mean | Max | Min) else Mean(*raw)
            merged[name] = _merge(name, merged[name], stat) if name in merged else stat
    return merged


def _merge(name: str, a: Stat, b: Stat) -> Stat:
    if isinstance(a, Mean) and isinstance(b, Mean):
        return Mean(a.total + b.total, a.weight + b.weight)
    if isinstance(a, Max) and isinstance(b, Max):
        return Max(torch.maximum(a.value, b.value))
    if isinstance(a, Min) and isinstance(b, Min):
        return Min(torch.minimum(a.value, b.value))
    raise ValueError(f"metric {name!r} is a {type(a).__name__} in one part and a {type(b).__name__} in another")


def stat_values(stats: Mapping[str, Stat]) -> dict[str, float]:
    """The plain numbers of `stats`; a mean over nothing, or an extreme of nothing, is left out rather than NaN.

    This is the one place where metrics leave the device: one transfer for all of them.
    """
    pairs = [s if isinstance(s, Mean) else (s.value, torch.ones_like(s.value)) for s in stats.values()]
    if not pairs:
        return {}
    table = torch.stack([torch.stack([p[0].double(), p[1].double()]) for p in pairs]).tolist()
    empty = (float("inf"), float("-inf"))
    return {
        name: total / count
        for name, stat, (total, count) in zip(stats, stats.values(), table, strict=True)
        if count != 0 and not (not isinstance(stat, Mean) and total in empty)
    }

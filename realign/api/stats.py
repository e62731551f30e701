"""Mergeable metrics: results do not depend on micro-batching, packing order or the number of ranks.

A loss returns each metric as a sum and a count (or as an extreme). The code that splits the batch merges them, and
computes the mean once, at the end.

Token traces are per-token values (ratio, entropy, advantage, ...) of selected prompts. A loss returns `TokenValues`
under any name. The engine keeps the values of the prompts in `MicroBatchSpec.trace_ids` as a `Trace`, and drops all
others.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from realign.api.microbatch import MicroBatchSpec
from realign.api.sample import RESPONSE_INDEX, TOKENS, SequenceSample


class Mean(NamedTuple):
    """A weighted mean, stored as its two sums (0-d tensors) and merged by adding both."""

    total: Tensor
    weight: Tensor


class Max(NamedTuple):
    """A maximum (0-d tensor), merged by taking the larger one."""

    value: Tensor


class Min(NamedTuple):
    """A minimum (0-d tensor), merged by taking the smaller one."""

    value: Tensor


class Sum(NamedTuple):
    """A count or a total (0-d tensor), merged by adding."""

    value: Tensor


class Variance(NamedTuple):
    """A population variance, stored as count, sum and sum of squares (float64, 0-d) and merged by adding them."""

    n: Tensor
    x: Tensor
    xx: Tensor


class Std(NamedTuple):
    """A population standard deviation, stored and merged like `Variance`."""

    n: Tensor
    x: Tensor
    xx: Tensor


class Correlation(NamedTuple):
    """A Pearson correlation of x and y, stored as six sums (float64, 0-d) and merged by adding them."""

    n: Tensor
    x: Tensor
    y: Tensor
    xx: Tensor
    yy: Tensor
    xy: Tensor


class TokenValues(NamedTuple):
    """Per-token values [T] of a micro-batch, which a loss returns for token traces; see `Trace`."""

    values_T: Tensor


class Trace(NamedTuple):
    """Per-token values of traced prompts (`MicroBatchSpec.trace_ids`), merged by concatenation."""

    values: Tensor
    """Values of all traced sequences, concatenated; float32."""
    tokens: Tensor
    """[traced sequences] number of tokens of each sequence."""
    prompts: Tensor
    """[traced sequences] index of the sequence's prompt in `trace_ids`."""
    responses: Tensor
    """[traced sequences] `response_index` of the sequence."""


Stat: TypeAlias = Mean | Max | Min | Sum | Variance | Std | Correlation | Trace
Stats: TypeAlias = dict[str, Stat]
LossStats: TypeAlias = Mapping[str, Stat | TokenValues | tuple[Tensor, Tensor]]
"""Metrics of a micro-batch as a loss returns them. A plain (total, weight) is a `Mean`."""


def masked_mean(x: Tensor, mask: Tensor) -> Mean:
    """Return the `Mean` of `x` [N] where `mask` [N] bool is True. Ignores all other values, including NaN."""
    return Mean(torch.where(mask, x, 0).sum(dtype=torch.float32).detach(), mask.sum())


def masked_max(x: Tensor, mask: Tensor) -> Max:
    """Return the `Max` of `x` [N] where `mask` [N] bool is True; -inf (not reported) if it is never True."""
    # `max` fails on an empty tensor.
    floor = torch.full((1,), -torch.inf, device=x.device)
    return Max(torch.cat([floor, torch.where(mask, x.detach().float(), -torch.inf)]).max())


def masked_variance(x: Tensor, mask: Tensor) -> Variance:
    """Return the `Variance` of `x` [N] where `mask` [N] bool is True; not reported if it is never True."""
    x = torch.where(mask, x.detach().double(), 0)
    return Variance(mask.sum().double(), x.sum(), (x * x).sum())


def masked_std(x: Tensor, mask: Tensor) -> Std:
    """Return the `Std` of `x` [N] where `mask` [N] bool is True; not reported if it is never True."""
    return Std(*masked_variance(x, mask))


def correlation(x: Tensor, y: Tensor, mask: Tensor) -> Correlation:
    """Return the `Correlation` of `x` and `y` [N] where `mask` [N] bool is True; not reported if one is constant."""
    x, y = (torch.where(mask, values.detach().double(), 0) for values in (x, y))
    return Correlation(mask.sum().double(), x.sum(), y.sum(), (x * x).sum(), (y * y).sum(), (x * y).sum())


def merge_stats(parts: Iterable[LossStats]) -> Stats:
    """Merge the metrics of several micro-batches, mini-batches or ranks, and detach them.

    Args:
        parts: metrics by name. A plain (total, weight) is a `Mean`. `TokenValues` are dropped. A name may be absent
            from some parts.

    Raises:
        ValueError: a metric has two kinds, or its value is not a metric of 0-d tensors.
    """
    merged: Stats = {}
    for part in parts:
        for name, raw in part.items():
            if isinstance(raw, TokenValues):
                continue
            stat = _as_stat(name, raw)
            merged[name] = _merge(name, merged[name], stat) if name in merged else stat
    return merged


def on_host(stats: Stats) -> Stats:
    """Return metrics on the host with the same bits, copied in one transfer; the host waits for the device once."""
    fields = [x for stat in stats.values() for x in stat if x.device.type != "cpu"]
    if not fields:
        return stats
    fields.sort(key=lambda x: -x.itemsize)  # so that every tensor starts at a multiple of its element size
    packed = torch.cat([x.contiguous().reshape(-1).view(torch.uint8) for x in fields]).cpu()
    bytes_of = torch.split(packed, [x.nbytes for x in fields])
    # clones, since pickling a view would send the memory of all metrics
    copies = {id(x): part.view(x.dtype).reshape(x.shape).clone() for x, part in zip(fields, bytes_of, strict=True)}
    return {name: type(stat)(*(copies.get(id(x), x) for x in stat)) for name, stat in stats.items()}


def stat_values(stats: LossStats) -> dict[str, float]:
    """Convert metrics to numbers. Omits means and extremes of zero elements.

    Copies all metrics of a device to the host in one transfer.
    """
    checked = merge_stats([stats])
    by_device: dict[torch.device, list[Tensor]] = {}
    checked = {name: stat for name, stat in checked.items() if not isinstance(stat, Trace)}
    for stat in checked.values():
        for x in stat:
            by_device.setdefault(x.device, []).append(x.double())
    numbers = {device: iter(torch.stack(values).tolist()) for device, values in by_device.items()}
    out = {}
    for name, stat in checked.items():
        fields = [next(numbers[x.device]) for x in stat]
        value = _value(stat, fields)
        if value is not None:
            out[name] = value
    return out


def _value(stat: Stat, fields: list[float]) -> float | None:
    if isinstance(stat, Mean):
        total, weight = fields
        return total / weight if weight != 0 else None
    if isinstance(stat, Variance | Std):
        n, x, xx = fields
        # Rounding can make the difference negative.
        variance = max(0.0, xx / n - (x / n) ** 2) if n else None
        return variance if variance is None or isinstance(stat, Variance) else math.sqrt(variance)
    if isinstance(stat, Correlation):
        return _pearson(*fields)
    of_nothing = -math.inf if isinstance(stat, Max) else math.inf if isinstance(stat, Min) else None
    return None if fields[0] == of_nothing else fields[0]


def _pearson(n: float, x: float, y: float, xx: float, yy: float, xy: float) -> float | None:
    if not n:
        return None
    variances = (xx / n - (x / n) ** 2, yy / n - (y / n) ** 2)
    # The variances are differences of sums, so values within rounding error of 0 count as 0.
    if variances[0] <= 1e-12 * xx / n or variances[1] <= 1e-12 * yy / n:
        return None
    return (xy / n - (x / n) * (y / n)) / math.sqrt(variances[0] * variances[1])


def _as_stat(name: str, raw: Stat | tuple[Tensor, Tensor]) -> Stat:
    kind = type(raw) if isinstance(raw, Stat) else Mean
    if not isinstance(raw, tuple) or len(raw) != len(kind._fields):
        raise ValueError(
            f"metric {name!r} must be Mean, Max, Min, Sum, Variance, Std, Correlation or (total, weight), "
            f"found {type(raw).__name__}"
        )
    if kind is Trace:
        return Trace(*(x.detach() for x in raw))
    return kind(*(_number(name, torch.as_tensor(x)) for x in raw))


def _number(name: str, x: Tensor) -> Tensor:
    """Return a number without dimensions in a dtype that is safe to sum: bools would be or-ed, and fp16 would round."""
    if x.numel() != 1:
        raise ValueError(f"metric {name!r} must contain single numbers, found a tensor of shape {list(x.shape)}")
    if not x.ndim and not x.requires_grad and x.dtype in (torch.float32, torch.float64, torch.int64):
        return x  # most are, and each step merges hundreds
    x = x.detach().reshape(())
    if x.is_floating_point():
        return x.float() if x.itemsize < 4 else x
    return x.long()


def _merge(name: str, a: Stat, b: Stat) -> Stat:
    if isinstance(a, Mean) and isinstance(b, Mean):
        return Mean(a.total + b.total, a.weight + b.weight)
    if isinstance(a, Max) and isinstance(b, Max):
        return Max(torch.maximum(a.value, b.value))
    if isinstance(a, Min) and isinstance(b, Min):
        return Min(torch.minimum(a.value, b.value))
    if isinstance(a, Sum) and isinstance(b, Sum):
        return Sum(a.value + b.value)
    if isinstance(a, Variance) and isinstance(b, Variance):
        return Variance(a.n + b.n, a.x + b.x, a.xx + b.xx)
    if isinstance(a, Std) and isinstance(b, Std):
        return Std(a.n + b.n, a.x + b.x, a.xx + b.xx)
    if isinstance(a, Trace) and isinstance(b, Trace):
        return Trace(*(torch.cat([p, q]) for p, q in zip(a, b, strict=True)))
    if isinstance(a, Correlation) and isinstance(b, Correlation):
        return Correlation(*(p + q for p, q in zip(a, b, strict=True)))
    raise ValueError(
        f"metric {name!r} is {type(a).__name__} in one micro-batch and {type(b).__name__} in another. Use one kind"
    )


class TracedSequence(NamedTuple):
    """The per-token values of one response."""

    prompt: Hashable
    response: int
    """Its `response_index`."""
    values: dict[str, Tensor]
    """Values by name: [tokens of the sequence] float32."""


def keep_traces(stats: Mapping[str, Any], data: SequenceSample, mb_spec: MicroBatchSpec) -> dict[str, Any]:
    """Reduce each `TokenValues` in the metrics of a micro-batch to the traced prompts, or drop it.

    Args:
        stats: metrics that a loss returned.
        data: the micro-batch. Sequences without `response_index`, which an interface made by itself, have no traces.
        mb_spec: spec with the `trace_ids`.
    """
    token_values = {name: stat for name, stat in stats.items() if isinstance(stat, TokenValues)}
    plain = {name: stat for name, stat in stats.items() if name not in token_values}
    place = {prompt: i for i, prompt in enumerate(mb_spec.trace_ids)}
    if not token_values or not place or RESPONSE_INDEX not in data:
        return plain
    lengths = data.lengths[TOKENS]
    # Copies, since torch warns about numpy arrays that are read-only.
    index_S = torch.tensor([place.get(i, -1) for i in data.ids])[torch.from_numpy(lengths.prompt_of_sequence.copy())]
    tokens_S = torch.from_numpy(lengths.flat.copy()).long()
    chosen_S = index_S >= 0
    chosen_T = chosen_S.repeat_interleave(tokens_S)
    about = tokens_S[chosen_S], index_S[chosen_S], data[RESPONSE_INDEX].cpu()[chosen_S]
    traces = {
        name: Trace(stat.values_T.detach().float()[chosen_T.to(stat.values_T.device)].cpu(), *about)
        for name, stat in token_values.items()
    }
    return plain | traces


def iter_traced(stats: Stats, trace_ids: tuple[Hashable, ...]) -> Iterator[TracedSequence]:
    """Yield the traced sequences of merged metrics, in the order of their computation.

    Args:
        stats: metrics that a `train_step` returned. A response trained in several epochs appears several times.
        trace_ids: the `trace_ids` of the `MicroBatchSpec`.
    """
    traces = {name: stat for name, stat in stats.items() if isinstance(stat, Trace)}
    first = next(iter(traces.values()), None)
    if first is None:
        return
    split = {name: trace.values.split(trace.tokens.tolist()) for name, trace in traces.items()}
    for i, (prompt, response) in enumerate(zip(first.prompts.tolist(), first.responses.tolist(), strict=True)):
        yield TracedSequence(trace_ids[prompt], response, {name: parts[i] for name, parts in split.items()})

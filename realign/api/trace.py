"""Token traces: per-token values (ratio, entropy, advantage, ...) of selected prompts, returned with the metrics.

A loss returns `TokenValues` under any name. The engine keeps the values of the prompts in `MicroBatchSpec.trace_ids`
as a `Trace`, and drops all others.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from realign.api.microbatch import MicroBatchSpec
from realign.api.sample import TOKENS, SequenceSample
from realign.api.stats import Stats, TokenValues, Trace

RESPONSE = "trace_response"
"""Key [S] with the index of each response among the responses to its prompt. The engine adds it before splitting."""


class TracedSequence(NamedTuple):
    """The per-token values of one response."""

    prompt: Hashable
    response: int
    values: dict[str, Tensor]
    """Values by name: [tokens of the sequence] float32."""


def with_responses(data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
    """Add the key `trace_response` to `data` if traces are on. The engine calls this before it splits a batch."""
    if not mb_spec.trace_ids:
        return data
    counts = data.lengths[TOKENS].counts.tolist()
    device = data[TOKENS].device
    return data.with_sequences(**{RESPONSE: torch.cat([torch.arange(n) for n in counts]).to(device)})


def keep_traces(stats: Mapping[str, Any], data: SequenceSample, mb_spec: MicroBatchSpec) -> dict[str, Any]:
    """Reduce each `TokenValues` in the metrics of a micro-batch to the traced prompts, or drop it.

    Args:
        stats: metrics that a loss returned.
        data: the micro-batch, with `trace_response` if traces are on.
        mb_spec: spec with the `trace_ids`.
    """
    found = {name: stat for name, stat in stats.items() if isinstance(stat, TokenValues)}
    plain = {name: stat for name, stat in stats.items() if name not in found}
    place = {prompt: i for i, prompt in enumerate(mb_spec.trace_ids)}
    if not found or not place:
        return plain
    lengths = data.lengths[TOKENS]
    index_S = torch.tensor([place.get(i, -1) for i in data.ids])[torch.from_numpy(lengths.prompt_of_sequence.copy())]
    tokens_S = torch.from_numpy(lengths.flat.copy()).long()
    chosen_S = index_S >= 0
    chosen_T = chosen_S.repeat_interleave(tokens_S)
    about = tokens_S[chosen_S], index_S[chosen_S], data[RESPONSE].cpu()[chosen_S]
    traces = {
        name: Trace(stat.values_T.detach().float()[chosen_T.to(stat.values_T.device)].cpu(), *about)
        for name, stat in found.items()
    }
    return plain | traces


def traced(stats: Stats, trace_ids: tuple[Hashable, ...]) -> Iterator[TracedSequence]:
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


__all__ = ["TracedSequence", "keep_traces", "traced", "with_responses"]

"""Token traces: values of single tokens (ratio, entropy, advantage, ...) of chosen prompts, returned with the metrics.

A loss reports `TokenValues` under any name. The engine keeps those of the prompts in `MicroBatchSpec.trace_ids` as a
`Trace` and drops all others, so that traces cost nothing when they are off.
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
"""Key [S] with the index of each response among those to its prompt, which the engine adds before it cuts a batch."""


class TracedSequence(NamedTuple):
    """The values of the tokens of one response."""

    prompt: Hashable
    response: int
    values: dict[str, Tensor]
    """By name, [tokens of the sequence] float32."""


def with_responses(data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
    """`data` with the key `trace_response` if traces are on; the engine calls this before it cuts a batch."""
    if not mb_spec.trace_ids:
        return data
    counts = data.lengths[TOKENS].counts.tolist()
    device = data[TOKENS].device
    return data.with_sequences(**{RESPONSE: torch.cat([torch.arange(n) for n in counts]).to(device)})


def keep_traces(stats: Mapping[str, Any], data: SequenceSample, mb_spec: MicroBatchSpec) -> dict[str, Any]:
    """The metrics of a micro-batch with each `TokenValues` reduced to the traced prompts, or dropped.

    Args:
        stats: as a loss returned them.
        data: the micro-batch, with `trace_response` if traces are on.
        mb_spec: with `trace_ids`.
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
    """The traced sequences of merged metrics, in the order in which they were computed.

    Args:
        stats: as a `train_step` returned them. A response that trained in several epochs appears several times.
        trace_ids: those of the `MicroBatchSpec`.
    """
    traces = {name: stat for name, stat in stats.items() if isinstance(stat, Trace)}
    first = next(iter(traces.values()), None)
    if first is None:
        return
    split = {name: trace.values.split(trace.tokens.tolist()) for name, trace in traces.items()}
    for i, (prompt, response) in enumerate(zip(first.prompts.tolist(), first.responses.tolist(), strict=True)):
        yield TracedSequence(trace_ids[prompt], response, {name: parts[i] for name, parts in split.items()})


__all__ = ["TracedSequence", "keep_traces", "traced", "with_responses"]

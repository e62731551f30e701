"""Key `router_experts`: the experts that the routers of a mixture of experts chose for each token in a rollout.

A sequence has one row per token of `input_ids`, or no rows if nothing was recorded, such as for pretraining text. A row
contains the K chosen experts of each of L routers, in the order of the layers: [L * K] int16. A row of -1 means that
the choice is unknown, as for the last token of a response, which the sampler never passes through the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from realign.api.lengths import Lengths
from realign.api.sample import TOKENS, SequenceSample

ROUTER_EXPERTS = "router_experts"
"""The key, [T, L * K] int16."""

UNKNOWN = -1
"""Entry of a token whose choice was not recorded."""


def with_experts(data: SequenceSample, experts: Sequence[Tensor | None]) -> SequenceSample:
    """Add the experts of each sequence of `input_ids`, [tokens, L * K]; None: not recorded.

    Raises:
        ValueError: a sequence has another number of rows than tokens.
    """
    known = [x for x in experts if x is not None]
    lengths = _where(data, np.array([x is not None for x in experts], dtype=bool))
    packed = torch.cat(known) if known else torch.zeros(0, 0, dtype=torch.int16)
    return data.with_data({ROUTER_EXPERTS: packed.to(data[TOKENS].device)}, lengths=lengths)


def without_experts(data: SequenceSample) -> SequenceSample:
    """Add the key without a record for any sequence."""
    return with_experts(data, [None] * data.n_sequences)


def experts_per_token(data: SequenceSample) -> Tensor | None:
    """Return the experts of every token of `input_ids`, [T, L * K]; None if no sequence has a record.

    Raises:
        ValueError: a sequence has neither one row per token nor none.
    """
    experts = data.get(ROUTER_EXPERTS)
    if experts is None or not len(experts):
        return None
    lengths, tokens = data.lengths[ROUTER_EXPERTS], data.lengths[TOKENS]
    if lengths == tokens:
        return experts
    known_S = lengths.flat > 0
    if not lengths.same_sequences(tokens) or lengths != _where(data, known_S):
        raise ValueError(f"key {ROUTER_EXPERTS!r}: a sequence must have one row per token of {TOKENS!r}, or none")
    known_T = torch.from_numpy(np.repeat(known_S, tokens.flat)).to(experts.device)
    full = experts.new_full((tokens.total, experts.shape[1]), UNKNOWN)
    full[known_T] = experts
    return full


def _where(data: SequenceSample, known_S: npt.NDArray[np.bool_]) -> Lengths:
    """Return the lengths of `input_ids`, with 0 for sequences without a record."""
    tokens = data.lengths[TOKENS]
    return Lengths(tokens.counts, np.where(known_S, tokens.flat, 0))

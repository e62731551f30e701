"""Helpers for algorithms that compare the responses to one prompt: pairing and training on whole groups."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from realign.api import MicroBatchSpec, Model, SequenceSample, Stats, merge_stats
from realign.api.engine import LossFn, LossWeightFn
from realign.errors import DataError
from realign.functional import segment_sum
from realign.functional.packed import check_shapes


class Pairs(NamedTuple):
    """Indices of the two responses of each pair among S sequences."""

    chosen_P: Tensor
    """int64 index of the response with the larger label."""
    rejected_P: Tensor
    """int64 index of the other response."""
    counts_P: Tensor
    """bool: whether the pair is valid, that is, both responses are present and their labels differ."""


def pairs_by_label(labels_S: Tensor, present_S: Tensor) -> Pairs:
    """Pair sequences 0 and 1, 2 and 3, and so on. The response with the larger label is the chosen one.

    Args:
        labels_S: [S] labels; the sequences of a pair are adjacent.
        present_S: [S] bool, whether the sequence can be compared.

    Raises:
        ValueError: the number of sequences is odd, or the shapes differ.
    """
    check_shapes(labels_S, present_S=present_S)
    if len(labels_S) % 2:
        raise ValueError(f"pairs need an even number of sequences, found {len(labels_S)}")
    first_P = torch.arange(0, len(labels_S), 2, device=labels_S.device)
    swapped_P = labels_S[first_P] < labels_S[first_P + 1]
    differ_P = labels_S[first_P] != labels_S[first_P + 1]
    return Pairs(
        first_P + swapped_P.long(),
        first_P + (~swapped_P).long(),
        present_S[first_P] & present_S[first_P + 1] & differ_P,
    )


def has_answer(data: SequenceSample) -> Tensor:
    """Return [S] bool: whether the response has a token in `loss_mask`."""
    return segment_sum(data["loss_mask"], data.cu_seqlens()) > 0


def pairs_of(data: SequenceSample) -> Pairs:
    """Return the pairs of a batch that passes `check_pairs`; pairs with an empty response are excluded."""
    return pairs_by_label(data["labels"], has_answer(data))


def check_pairs(data: SequenceSample) -> None:
    """Check that every prompt has an even number of responses.

    Raises:
        DataError: a prompt has an odd number of responses. The message names its id.
    """
    counts = data.lengths["input_ids"].counts
    for i in np.flatnonzero(counts % 2):
        raise DataError(f"id {data.ids[i]!r} has {counts[i]} responses. Pairs need an even number")


def train_on_groups(
    model: Model,
    data: SequenceSample,
    mb_spec: MicroBatchSpec,
    n_minibatches: int,
    loss: LossFn,
    loss_weight: LossWeightFn,
) -> Stats:
    """Take `n_minibatches` optimizer steps over the batch, in a new random order; groups stay together."""
    # A loss pairs neighbors of its micro-batch, so a cut inside a group would pair the wrong responses.
    mb_spec = replace(mb_spec, whole_groups=True)
    parts = data.minibatches(n_minibatches, np.random.default_rng(model.call_seed("minibatches")))
    return merge_stats(model.engine.train_batch(part, mb_spec, loss, loss_weight) for part in parts)

"""Helpers for algorithms that compare the responses to one prompt: pairing and training on whole groups."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from realign.api import MicroBatchSpec, Model, SequenceSample, Stats, merge_stats
from realign.api.engine import LossFn, LossWeightFn
from realign.errors import DataError
from realign.functional import Pairs, pairs_by_label, segment_sum


def answered(data: SequenceSample) -> Tensor:
    """Return [S] bool: whether the response has a token in `loss_mask`."""
    return segment_sum(data["loss_mask"], data.cu_seqlens()) > 0


def pairs_of(data: SequenceSample) -> Pairs:
    """Return the pairs of a batch that passes `check_pairs`; pairs with an empty response are excluded."""
    return pairs_by_label(data["labels"], answered(data))


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
    whole = replace(mb_spec, whole_groups=True)
    parts = data.minibatches(n_minibatches, np.random.default_rng(model.call_seed("minibatches")))
    return merge_stats(model.machine.train_batch(part, whole, loss, loss_weight) for part in parts)

"""What the algorithms share that compare the responses to one prompt: which are pairs, and how they are trained on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from realign.api import MicroBatchSpec, Model, SequenceSample, Stats, merge_stats
from realign.api.model import LossFn, LossWeightFn
from realign.functional import Pairs, pairs_by_label, segment_sum


def answered(data: SequenceSample) -> Tensor:
    """[S] bool: the response has a token that counts."""
    return segment_sum(data["loss_mask"], data.cu_seqlens()) > 0


def pairs_of(data: SequenceSample) -> Pairs:
    """The pairs of a batch that `check_pairs` let pass; those with an empty response do not count."""
    return pairs_by_label(data["labels"], answered(data))


def check_pairs(data: SequenceSample) -> None:
    """Raise a ValueError that names the id, if a prompt has an odd number of responses."""
    counts = data.lengths["input_ids"].counts
    for i in np.flatnonzero(counts % 2):
        raise ValueError(f"id {data.ids[i]!r} has {counts[i]} responses, but neighbours are pairs")


def train_on_groups(
    model: Model,
    data: SequenceSample,
    mb_spec: MicroBatchSpec,
    n_minibatches: int,
    loss: LossFn,
    loss_weight: LossWeightFn,
) -> Stats:
    """`n_minibatches` optimizer steps over the batch, in a fresh order; responses to one prompt stay together."""
    whole = replace(mb_spec, whole_groups=True)
    parts = data.minibatches(n_minibatches, np.random.default_rng(model.call_seed("minibatches")))
    return merge_stats(model.machine.train_batch(part, whole, loss, loss_weight) for part in parts)

"""Checks of the values that callbacks of an interface return."""

from __future__ import annotations

import torch
from torch import Tensor

from realign.api.sample import SequenceSample


def added(result: SequenceSample, micro_batch: SequenceSample) -> SequenceSample:
    """Return the keys of `result` that the micro-batch does not contain."""
    new = [k for k, x in result.data.items() if x is not micro_batch.data.get(k)]
    if not new:
        raise ValueError(
            f"post_hook returned only keys of the micro-batch ({', '.join(sorted(result.data))}). It must add a key."
        )
    return result.select(new)


def check_loss(loss: Tensor) -> None:
    """Raise ValueError unless `loss`, returned by a `loss_fn`, is a 0-d floating-point sum."""
    if loss.ndim or loss.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"loss_fn returned {loss.dtype} {list(loss.shape)}. It must return a 0-d float32 sum.")

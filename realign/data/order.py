"""In which order rows are trained on: a pure function of the seed and the position in the stream.

The stream is one epoch's permutation after another, cut into batches wherever they end. So no row is dropped, a
dataset smaller than a batch still fills it, and any step is found without replaying the ones before (resuming).
"""

from __future__ import annotations

import numpy as np

from realign.api.lengths import IntArray
from realign.api.model import derive_seed


def epoch_order(n: int, seed: int, epoch: int) -> IntArray:
    """[n] the permutation of rows 0 to n - 1 in this epoch; the same in every process and for every step."""
    bits = derive_seed(seed, "epoch_order", epoch)
    # The legacy generator is the one whose stream numpy promises never to change: resumed runs depend on it.
    return np.random.RandomState([bits & 0xFFFFFFFF, bits >> 32]).permutation(n).astype(np.int64)


def batch_indices(n: int, batch_prompts: int, step: int, seed: int, shuffle: bool) -> list[tuple[int, int]]:
    """The (epoch, row) of each prompt in the batch of a step (counted from 0), out of a dataset of `n` rows.

    Raises:
        ValueError: an empty dataset or batch, or a negative step.
    """
    for name, value, least in (("n", n, 1), ("batch_prompts", batch_prompts, 1), ("step", step, 0)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, found {value}")
    first = step * batch_prompts
    last = first + batch_prompts
    batch: list[tuple[int, int]] = []
    for epoch in range(first // n, (last - 1) // n + 1):
        order = epoch_order(n, seed, epoch) if shuffle else np.arange(n)
        batch += [(epoch, row) for row in order[max(first - epoch * n, 0) : last - epoch * n].tolist()]
    return batch

"""Batches of right-padded rows for code that cannot run packed.

In causal code the result for a token depends only on previous tokens, so padding after a sequence changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

SHORTEST = 0.75
"""Length of the shortest sequence of a batch, as a fraction of the longest."""


def similar_lengths(lengths: Sequence[int], shortest: float = SHORTEST) -> Iterator[list[int]]:
    """Yield the indices of the sequences of each batch, by decreasing length; empty sequences are in no batch.

    Args:
        lengths: the lengths.
        shortest: see `SHORTEST`; 1 yields batches of equal lengths.
    """
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and lengths[i] < lengths[batch[0]] * shortest:
            yield batch
            batch = []
        if lengths[i]:
            batch.append(i)
    if batch:
        yield batch

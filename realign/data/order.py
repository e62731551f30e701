"""Training order of the rows: a pure function of the seed and the position in the stream.

The stream concatenates one permutation of the rows per epoch. Batches are consecutive slices of the stream and may
span epochs. So no row is dropped, and a dataset smaller than a batch still fills it. The batch of any step can be
computed without replaying earlier steps, which resuming needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from realign.api.lengths import IntArray
from realign.api.seeds import derive_seed


def epoch_order(n: int, seed: int, epoch: int) -> IntArray:
    """Return the permutation [n] of rows 0 to n - 1 for an epoch; identical in every process and at every step."""
    bits = derive_seed(seed, "epoch_order", epoch)
    # numpy guarantees the stream of the legacy generator only; resumed runs depend on it.
    return np.random.RandomState([bits & 0xFFFFFFFF, bits >> 32]).permutation(n).astype(np.int64)


def batch_indices(n: int, batch_prompts: int, step: int, seed: int, shuffle: bool) -> list[tuple[int, int]]:
    """Return the (epoch, row) of each prompt in the batch of a step (counted from 0), for a dataset of `n` rows.

    Raises:
        ValueError: the dataset or the batch is empty, or the step is negative.
    """
    for name, value, least in (("n", n, 1), ("batch_prompts", batch_prompts, 1), ("step", step, 0)):
        if value < least:
            raise ValueError(f"{name}={value}: must be at least {least}.")
    first = step * batch_prompts
    last = first + batch_prompts
    batch: list[tuple[int, int]] = []
    for epoch in range(first // n, (last - 1) // n + 1):
        order = epoch_order(n, seed, epoch) if shuffle else np.arange(n)
        batch += [(epoch, row) for row in order[max(first - epoch * n, 0) : last - epoch * n].tolist()]
    return batch


class RowOrder(ABC):
    """Rows at the places of an endless stream of prompts, counted from 0."""

    @property
    @abstractmethod
    def rows_per_epoch(self) -> int | None:
        """Number of different rows; None if it is not known yet."""

    @abstractmethod
    def rows(self, places: Sequence[int]) -> list[tuple[int, Any]]:
        """Return the (epoch, row) at each place, for `Dataset.sample`."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of the rows that the last call of `rows` returned."""
        return {}

    def state_dict(self) -> dict[str, Any] | None:
        """Return what continues the order without reading earlier rows; None if nothing is needed."""
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 (optional)
        """Restore a `state_dict`."""


class EpochOrder(RowOrder):
    """One permutation of all rows per epoch."""

    def __init__(self, n: int, seed: int, shuffle: bool) -> None:
        """Initialize the order of `n` rows. Without `shuffle`, every epoch has the order of the dataset."""
        self.n, self.seed, self.shuffle = n, seed, shuffle
        self._orders: dict[int, IntArray] = {}  # the latest two, since large ones are slow

    @property
    def rows_per_epoch(self) -> int:
        """See `RowOrder`."""
        return self.n

    def rows(self, places: Sequence[int]) -> list[tuple[int, int]]:
        """See `RowOrder`."""
        return [(place // self.n, int(self._order(place // self.n)[place % self.n])) for place in places]

    def _order(self, epoch: int) -> IntArray:
        if epoch not in self._orders:
            order = epoch_order(self.n, self.seed, epoch) if self.shuffle else np.arange(self.n)
            self._orders = {**dict(list(self._orders.items())[-1:]), epoch: order}
        return self._orders[epoch]

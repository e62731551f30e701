"""Weighted mixtures: which source the prompt at each place of the stream comes from.

The choice is a pure function of the weights, the seed and the place. Sources repeat independently: each has its own
epochs, so a small source with a large weight is repeated more often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from realign.api.lengths import IntArray
from realign.api.seeds import derive_seed
from realign.data.order import EpochOrder, RowOrder

BLOCK = 1024
"""Places of a block. The number of places of a source in a block differs from its expectation by less than one."""


@dataclass(frozen=True, eq=False)
class Mixture:
    """Sources of the rows of a dataset, which contains the rows of one source after another.

    Attributes:
        names: Name of each source.
        sizes: Number of rows of each source.
        weights: Weight of each source; None if every row occurs once per epoch.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    weights: tuple[float, ...] | None

    def order(self, seed: int, shuffle: bool) -> RowOrder:
        """Return the training order of the rows."""
        if self.weights is None:
            return EpochOrder(sum(self.sizes), seed, shuffle)
        return MixtureOrder(self, self.weights, seed, shuffle)

    def describe(self) -> str:
        """Return the number of rows and the weight of each source."""
        weights = [None] * len(self.sizes) if self.weights is None else list(self.weights)
        parts = zip(self.names, self.sizes, weights, strict=True)
        return ", ".join(f"{name} {n:,}{'' if w is None else f' (weight {w:g})'}" for name, n, w in parts)


class SourceChoice:
    """Source of each place of the stream.

    A block of `BLOCK` places contains systematic samples of the sources, randomly permuted.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self.weights, self.seed = tuple(weights), seed
        self._bounds = np.cumsum(self.weights) / sum(self.weights)
        self._before = [np.zeros(len(self.weights), dtype=np.int64)]  # places of each source before each block
        self._block: tuple[int, IntArray, IntArray] = (-1, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))

    def of(self, place: int) -> tuple[int, int]:
        """Return the source of a place, and the number of earlier places with the same source."""
        number, inside = divmod(place, BLOCK)
        while len(self._before) <= number:
            sources = self._sources(len(self._before) - 1)
            self._before.append(self._before[-1] + np.bincount(sources, minlength=len(self.weights)))
        if self._block[0] != number:
            sources = self._sources(number)
            hits = sources[:, None] == np.arange(len(self.weights))
            self._block = (number, sources, hits.cumsum(0)[np.arange(BLOCK), sources] - 1)
        _, sources, ranks = self._block
        source = int(sources[inside])
        return source, int(self._before[number][source] + ranks[inside])

    def _sources(self, block: int) -> IntArray:
        bits = derive_seed(self.seed, "mixture", block)
        random = np.random.RandomState([bits & 0xFFFFFFFF, bits >> 32])
        points = (np.arange(BLOCK) + random.random_sample()) / BLOCK
        found = np.minimum(np.searchsorted(self._bounds, points, side="right"), len(self.weights) - 1)
        return random.permutation(found).astype(np.int64)


class MixtureOrder(RowOrder):
    """Order of the rows of a weighted mixture in memory."""

    def __init__(self, mixture: Mixture, weights: Sequence[float], seed: int, shuffle: bool) -> None:
        self._mixture = mixture
        self._choice = SourceChoice(weights, seed)
        self._starts = np.cumsum([0, *mixture.sizes])
        self._orders = [
            EpochOrder(n, derive_seed(seed, "source", index), shuffle) for index, n in enumerate(mixture.sizes)
        ]
        self._drawn: Counter[int] = Counter()

    @property
    def rows_per_epoch(self) -> int:
        """See `RowOrder`."""
        return sum(self._mixture.sizes)

    def rows(self, places: Sequence[int]) -> list[tuple[int, int]]:
        """See `RowOrder`. Epochs are those of the source."""
        found, drawn = [], Counter[int]()
        for place in places:
            source, earlier = self._choice.of(place)
            ((epoch, row),) = self._orders[source].rows([earlier])
            found.append((epoch, int(self._starts[source]) + row))
            drawn[source] += 1
        self._drawn = drawn
        return found

    def metrics(self) -> dict[str, float]:
        """See `RowOrder`."""
        return fractions(self._mixture.names, self._drawn)


def fractions(names: Sequence[str], drawn: Counter[int]) -> dict[str, float]:
    """Return the fraction of prompts of each source as metrics; empty if none were drawn."""
    total = drawn.total()
    return {f"data/{name}/fraction": drawn[i] / total for i, name in enumerate(names)} if total else {}

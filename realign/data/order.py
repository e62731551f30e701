"""Training order of the rows: a pure function of the seed and the position in the stream.

The stream concatenates one permutation of the rows per epoch. Batches are consecutive slices of the stream and may
span epochs. So no row is dropped, and a dataset smaller than a batch still fills it. The batch of any step can be
computed without replaying earlier steps, which resuming needs.

A weighted mixture first chooses the source of each place, as a pure function of the weights, the seed and the place.
Weights may change with the place.
Each source has its own epochs, so a small source with a large weight repeats more often.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import override

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
    return EpochOrder(n, seed, shuffle).rows(range(step * batch_prompts, (step + 1) * batch_prompts))


FRUITLESS = 100
"""Give up after this many times the rows, at least 100 of them, that were drawn without one of use."""


class RowOrder(ABC):
    """Rows at the places of an endless stream of prompts, counted from 0."""

    @property
    @abstractmethod
    def rows_per_epoch(self) -> int | None:
        """Number of different rows; None if it is not known yet."""

    @abstractmethod
    def rows(self, places: Sequence[int]) -> list[tuple[int, Any]]:
        """Return the (epoch, row) at each place, for `Dataset.sample`."""

    def is_exhausted(self, used: AbstractSet[Any]) -> bool:
        """Return whether no row is left besides those in `used`."""
        n = self.rows_per_epoch
        return n is not None and len(used) >= n

    def metrics(self) -> dict[str, float]:
        """Return metrics of the rows that the last call of `rows` returned."""
        return {}

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state needed to resume this order, or None if it's stateless."""
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 (optional)
        """Restore a `state_dict`."""


class EpochOrder(RowOrder):
    """One permutation of all rows per epoch."""

    def __init__(self, n: int, seed: int, shuffle: bool) -> None:
        """Initialize the order of `n` rows. Without `shuffle`, every epoch has the order of the dataset."""
        self.n, self.seed, self.shuffle = n, seed, shuffle
        # The latest two, since a batch may span two epochs and permuting a large dataset again is slow.
        self._orders: dict[int, IntArray] = {}

    @property
    @override
    def rows_per_epoch(self) -> int:
        return self.n

    @override
    def rows(self, places: Sequence[int]) -> list[tuple[int, int]]:
        return [(place // self.n, int(self._order(place // self.n)[place % self.n])) for place in places]

    def _order(self, epoch: int) -> IntArray:
        if epoch not in self._orders:
            order = epoch_order(self.n, self.seed, epoch) if self.shuffle else np.arange(self.n)
            self._orders = {**dict(list(self._orders.items())[-1:]), epoch: order}
        return self._orders[epoch]


BLOCK = 1024
"""Places of a block. The number of places of a source in a block differs from its expectation by less than one."""


class Ramp(NamedTuple):
    """Weight of a source that changes linearly during the first prompts of a run."""

    first: float
    final: float
    prompts: int
    """Number of prompts after which the weight is `final`."""

    def at(self, places: IntArray) -> npt.NDArray[np.float64]:
        """Return the weight at places of the stream."""
        return np.asarray(self.first + (self.final - self.first) * np.minimum(places / self.prompts, 1))

    def __format__(self, spec: str) -> str:
        return f"{self.first:{spec}} to {self.final:{spec}} over {self.prompts:,} prompts"


@dataclass(frozen=True, eq=False)
class Mixture:
    """Sources of the rows of a dataset, which contains the rows of one source after another.

    Attributes:
        names: Name of each source.
        sizes: Number of rows of each source.
        weights: Weight of each source, which may change; None if every row occurs once per epoch.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    weights: tuple[float | Ramp, ...] | None

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

    def __init__(self, weights: Sequence[float | Ramp], seed: int) -> None:
        self.weights, self.seed = tuple(weights), seed
        constant = [weight for weight in self.weights if not isinstance(weight, Ramp)]
        self._bounds = np.cumsum(constant) / sum(constant) if len(constant) == len(self.weights) else None
        self._before = [np.zeros(len(self.weights), dtype=np.int64)]  # places of each source before each block
        self._block: tuple[int, IntArray, IntArray] = (-1, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))

    def of(self, place: int) -> tuple[int, int]:
        """Return the source of a place, and the number of earlier places with the same source."""
        number, inside = divmod(place, BLOCK)
        # A resumed run draws all earlier blocks once, since the rank of a place counts the places before it.
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
        if self._bounds is None:
            points, places = random.permutation(points), np.arange(block * BLOCK, (block + 1) * BLOCK)
            ramps = [weight if isinstance(weight, Ramp) else Ramp(weight, weight, 1) for weight in self.weights]
            bounds_KT = np.cumsum([ramp.at(places) for ramp in ramps], axis=0)
            return (points * bounds_KT[-1] >= bounds_KT[:-1]).sum(0)
        # By rounding, the last bound can be just below 1, and a point above it.
        sources = np.minimum(np.searchsorted(self._bounds, points, side="right"), len(self.weights) - 1)
        return random.permutation(sources).astype(np.int64)


class MixtureOrder(RowOrder):
    """Order of the rows of a weighted mixture in memory."""

    def __init__(self, mixture: Mixture, weights: Sequence[float | Ramp], seed: int, shuffle: bool) -> None:
        self._mixture = mixture
        self._choice = SourceChoice(weights, seed)
        self._starts = np.cumsum([0, *mixture.sizes])
        self._orders = [
            # a seed per source: two sources of the same size would otherwise have the same order
            EpochOrder(n, derive_seed(seed, "source", index), shuffle)
            for index, n in enumerate(mixture.sizes)
        ]
        self._drawn: Counter[int] = Counter()

    @property
    @override
    def rows_per_epoch(self) -> int:
        return sum(self._mixture.sizes)

    @override
    def rows(self, places: Sequence[int]) -> list[tuple[int, int]]:
        """Return the (epoch, row) at each place. Epochs are those of the source."""
        rows, drawn = [], Counter[int]()
        for place in places:
            source, earlier = self._choice.of(place)
            ((epoch, row),) = self._orders[source].rows([earlier])
            rows.append((epoch, int(self._starts[source]) + row))
            drawn[source] += 1
        self._drawn = drawn
        return rows

    @override
    def metrics(self) -> dict[str, float]:
        return fractions(self._mixture.names, self._drawn)


def fractions(names: Sequence[str], drawn: Counter[int]) -> dict[str, float]:
    """Return the fraction of prompts of each source as metrics; empty if none were drawn."""
    total = drawn.total()
    return {f"data/{name}/fraction": drawn[i] / total for i, name in enumerate(names)} if total else {}

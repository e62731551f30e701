"""Comparison of two sets of learning curves, one curve per seed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

Curves = npt.NDArray[np.float64]
"""[seeds, steps]."""
ROUNDING = 1e-6
"""Difference of means, relative to the largest mean, that counts as equal even with a standard error of 0."""
MOST_SPLITS = 1000
"""Splits of a permutation test; random ones if there are more."""


@dataclass(frozen=True)
class Agreement:
    """Agreement of two sets of curves."""

    fraction: float
    """Fraction of steps whose means differ by less than 2 standard errors."""
    expected: float
    """Mean of `fraction` over the ways to split the curves into two sets of these sizes."""
    p: float
    """Fraction of these splits with at most the `fraction` found: a permutation test of equal distributions."""
    largest: float
    """Largest difference of means, relative to the range of the mean curves."""


def within(a: Curves, b: Curves) -> float:
    """Return the fraction of steps at which the means differ by less than 2 standard errors of the difference."""
    errors = np.sqrt(a.var(0, ddof=1) / len(a) + b.var(0, ddof=1) / len(b))
    difference = np.abs(a.mean(0) - b.mean(0))
    equal = difference <= ROUNDING * np.abs(a.mean(0)).max()
    return float(((difference < 2 * errors) | equal).mean())


def splits(total: int, size: int) -> Iterator[tuple[int, ...]]:
    """Yield all subsets of `size` of `total` indices, or `MOST_SPLITS` random ones if there are more."""
    if math.comb(total, size) <= MOST_SPLITS:
        yield from combinations(range(total), size)
        return
    random = np.random.default_rng(0)
    for _ in range(MOST_SPLITS):
        yield tuple(random.permutation(total)[:size].tolist())


def compare(a: Curves, b: Curves) -> Agreement:
    """Compare two sets of curves with at least two seeds each."""
    every, distance = np.concatenate([a, b]), within(a, b)
    others = []
    for chosen in splits(len(every), len(a)):
        rest = np.setdiff1d(np.arange(len(every)), chosen)
        others.append(within(every[list(chosen)], every[rest]))
    means = np.concatenate([a.mean(0), b.mean(0)])
    span = float(means.max() - means.min())
    largest = float(np.abs(a.mean(0) - b.mean(0)).max()) / span if span else 0.0
    below = sum(value <= distance + 1e-12 for value in others)
    return Agreement(distance, float(np.mean(others)), below / len(others), largest)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean over seeds and its standard error."""
    array = np.array(values)
    return float(array.mean()), float(array.std(ddof=1)) / math.sqrt(len(array))


def table(columns: Mapping[str, Sequence[Sequence[Mapping[str, float]]]], names: Sequence[str]) -> list[list[str]]:
    """Return rows of cells: a metric, and its mean and standard error over seeds in each column.

    Args:
        columns: for each column the records of each seed; metrics are averaged over the records.
        names: the metrics.
    """
    rows = []
    for name in names:
        cells = [name]
        for seeds in columns.values():
            mean, error = mean_and_error([float(np.mean([r[name] for r in records])) for records in seeds])
            cells.append(f"{mean:.4g} ± {error:.1g}")
        rows.append(cells)
    return rows

"""Parts of one file for the stages of a pipeline: disjoint, together the whole, the same for whoever asks."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from realign.data.files import Table
from realign.data.order import epoch_order


@dataclass
class Split:
    """One of several parts into which a seed deals the rows of a file (config node).

    DeepSpeed-Chat gives 2, 4 and 4 tenths to SFT, reward model and RLHF. Each stage sets the same `weights` and `seed`
    and another `part`; no row is in two parts.
    """

    part: int = 0
    """Which one, from 0."""
    weights: list[float] = field(default_factory=lambda: [2, 4, 4])
    """How large the parts are, relative to each other."""
    seed: int = 0
    """Of the deal. It is not the run's seed, so that runs with different seeds have the same parts."""

    def __post_init__(self) -> None:
        if not self.weights or not all(weight > 0 for weight in self.weights):
            raise ValueError(f"split.weights must be positive numbers, found {self.weights}")
        if not 0 <= self.part < len(self.weights):
            raise ValueError(f"split.part must be from 0 to {len(self.weights) - 1}, found {self.part}")

    def apply(self, table: Table) -> Table:
        """The rows of this part, in the order of the file.

        Raises:
            ValueError: the file has too few rows to give one to this part.
        """
        ends = np.rint(np.cumsum(self.weights) / sum(self.weights) * len(table)).astype(int)
        begin = ends[self.part - 1] if self.part else 0
        chosen = sorted(epoch_order(len(table), self.seed, 0)[begin : ends[self.part]].tolist())
        if not chosen:
            raise ValueError(
                f"{table.path}: part {self.part} of split.weights={self.weights} gets none of {len(table)} rows"
            )
        return Table(table.path, [table.rows[i] for i in chosen], [table.places[i] for i in chosen], table.unit)

"""Disjoint splits of a source of rows for the stages of a pipeline."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from realign.data.order import epoch_order
from realign.data.table import Table
from realign.errors import DataError, SettingsError
from realign.settings import NonNegativeInt, Settings


@dataclass
class Split(Settings):
    """One of several disjoint, randomly assigned parts of the rows of a file (config node).

    All stages set the same `weights` and `seed`, and a different `part`. The parts together contain every row once.
    DeepSpeed-Chat uses 20%, 40% and 40% of the rows for SFT, reward model and RLHF.
    """

    part: NonNegativeInt = 0
    """Index of the part, from 0."""
    weights: list[float] = field(default_factory=lambda: [2, 4, 4])
    """Relative sizes of the parts."""
    seed: int = 0
    """Seed of the assignment. It is independent of the seed of the run, so all runs use the same parts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.weights or not all(weight > 0 and math.isfinite(weight) for weight in self.weights):
            raise SettingsError(f"weights={self.weights}: must be a list of positive, finite numbers")
        if self.part >= len(self.weights):
            raise SettingsError(f"part={self.part}: must be below the number of weights ({len(self.weights)})")

    def apply(self, table: Table) -> Table:
        """Return the rows of this part, in the order of the file.

        Raises:
            DataError: the file has too few rows, so this part is empty.
        """
        ends = np.rint(np.cumsum(self.weights) / sum(self.weights) * len(table)).astype(int)
        begin = ends[self.part - 1] if self.part else 0
        chosen = sorted(epoch_order(len(table), self.seed, 0)[begin : ends[self.part]].tolist())
        if not chosen:
            raise DataError(
                f"{table.path}: split.part={self.part} of split.weights={self.weights} contains none of {len(table)} "
                "rows."
            )
        return table.take(chosen)

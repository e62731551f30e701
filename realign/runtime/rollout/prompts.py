"""`PromptStream`: the prompts of training in their order, and the one number that says how far a run has come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from realign.api import SequenceSample
from realign.api.lengths import IntArray
from realign.data import Dataset, batch_indices
from realign.data.order import epoch_order


@dataclass
class PromptStream:
    """The dataset as one epoch after another, cut into batches of `batch_prompts` prompts.

    Attributes:
        dataset: the rows.
        batch_prompts: prompts of a batch.
        seed: of the order.
        shuffle: whether each epoch has an order of its own, or that of the file.
        drawn: batches drawn so far. The next batch is a pure function of this number and the seed, so it is all that a
            resumed run needs to know of its data.
    """

    dataset: Dataset
    batch_prompts: int
    seed: int
    shuffle: bool
    drawn: int = 0
    _orders: dict[int, IntArray] = field(default_factory=dict, init=False, repr=False)

    def rows(self, number: int) -> list[tuple[int, int]]:
        """The (epoch, row) of each prompt of a batch (counted from 0): a pure function of seed and number."""
        return batch_indices(len(self.dataset), self.batch_prompts, number, self.seed, self.shuffle)

    def at(self, places: Sequence[int]) -> SequenceSample:
        """The prompts at these places of the stream, counted from its beginning through all epochs."""
        n = len(self.dataset)
        return self.dataset.sample([(place // n, int(self._order(place // n)[place % n])) for place in places])

    def _order(self, epoch: int) -> IntArray:
        """[rows] of an epoch; the latest two are kept, since a large one takes a while."""
        if epoch not in self._orders:
            n = len(self.dataset)
            order = epoch_order(n, self.seed, epoch) if self.shuffle else np.arange(n)
            self._orders = {**dict(list(self._orders.items())[-1:]), epoch: order}
        return self._orders[epoch]

    def draw(self) -> SequenceSample:
        """The next batch."""
        self.drawn += 1
        return self.dataset.sample(self.rows(self.drawn - 1))

    def draw_new(self, used: set[int]) -> SequenceSample | None:
        """The next batch without the rows in `used`, to which its own are added; None when every row is used.

        Rows that were used come by again at the border of two epochs. Batches of nothing else are passed over.
        """
        while len(used) < len(self.dataset):
            new = []
            for epoch, row in self.rows(self.drawn):
                if row not in used:
                    used.add(row)
                    new.append((epoch, row))
            self.drawn += 1
            if new:
                return self.dataset.sample(new)
        return None

    def state_dict(self) -> dict[str, Any]:
        """The position, in batches and (for people) in epochs and rows of the epoch."""
        epoch, index = divmod(self.drawn * self.batch_prompts, len(self.dataset))
        where = {"epoch": epoch, "index": index, "seed": self.seed, "rows": len(self.dataset)}
        return {"drawn": self.drawn, "batch_prompts": self.batch_prompts, **where}

    def load_state_dict(self, state: Mapping[str, Any], place: int | None = None, *, cut: bool = False) -> None:
        """Go on where `state_dict` was taken, also with another number of prompts in a batch.

        Args:
            state: what it gave.
            place: of the next prompt, where prompts were taken one by one; None: behind the batches drawn.
            cut: prompts will be taken one by one, so that it need not be the first of a batch.

        Raises:
            ValueError: the dataset has another number of rows, and so another order, or no batch of this size begins
                there.
        """
        if state["rows"] != len(self.dataset):
            raise ValueError(
                f"the dataset has {len(self.dataset)} rows, and had {state['rows']} when the checkpoint was written: "
                "rows would come twice or never; resume_skip=[data] starts at its beginning"
            )
        place = state["drawn"] * state["batch_prompts"] if place is None else place
        if place % self.batch_prompts and not cut:
            raise ValueError(
                f"{place} prompts lie behind ({state['drawn']} batches of {state['batch_prompts']}), which is no whole "
                f"number of batches of {self.batch_prompts}; resume_skip=[data] starts at the beginning of the data"
            )
        self.drawn = -(-place // self.batch_prompts)

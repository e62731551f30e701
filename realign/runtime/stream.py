"""`PromptStream`: the prompts of training in their order, and the one number that says how far a run has come."""

from __future__ import annotations

from dataclasses import dataclass

from realign.api import SequenceSample
from realign.data import Dataset, batch_indices


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

    def rows(self, number: int) -> list[tuple[int, int]]:
        """The (epoch, row) of each prompt of a batch (counted from 0): a pure function of seed and number."""
        return batch_indices(len(self.dataset), self.batch_prompts, number, self.seed, self.shuffle)

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

"""`PromptStream`: the training prompts in order, with the data position of the run as a single number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from realign.api import SequenceSample
from realign.data import Dataset
from realign.data.order import RowOrder
from realign.errors import CheckpointError


@dataclass
class PromptStream:
    """The dataset repeated for all epochs, split into batches of `batch_prompts` prompts.

    Attributes:
        dataset: the rows.
        batch_prompts: prompts per batch.
        seed: seed of the order.
        shuffle: whether to shuffle each epoch separately; otherwise each epoch has the order of the file.
        drawn: batches drawn so far. The next batch depends only on this number and the seed, so this number is the
            whole data position of a resumed run. For streamed data, the state also contains positions in the files.
    """

    dataset: Dataset
    batch_prompts: int
    seed: int
    shuffle: bool
    drawn: int = 0

    @cached_property
    def order(self) -> RowOrder:
        """The rows at the places of the stream."""
        return self.dataset.order(self.seed, self.shuffle)

    def rows(self, number: int) -> list[tuple[int, Any]]:
        """Return (epoch, row) of each prompt of a batch (counted from 0); depends only on seed and number."""
        return self.order.rows(range(number * self.batch_prompts, (number + 1) * self.batch_prompts))

    def at(self, places: Sequence[int]) -> SequenceSample:
        """Return the prompts at these places of the stream, counted from the start of the first epoch."""
        return self.dataset.sample(self.order.rows(places))

    def draw(self) -> SequenceSample:
        """Return the next batch."""
        self.drawn += 1
        return self.dataset.sample(self.rows(self.drawn - 1))

    def draw_new(self, used: set[Any]) -> SequenceSample | None:
        """Return the next batch without the rows in `used`, and add its rows to `used`; None when every row is used.

        Used rows can reappear at the border of two epochs. Batches that contain only used rows are skipped.
        """
        while (n := self.order.rows_per_epoch) is None or len(used) < n:
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
        """Return the position in batches, and for display also as epoch and index within the epoch."""
        place, rows = self.drawn * self.batch_prompts, self.dataset.size
        epoch, index = (0, place) if rows is None else divmod(place, rows)
        where = {"epoch": epoch, "index": index, "seed": self.seed, "rows": rows or 0}
        order = self.order.state_dict()
        streamed = {} if order is None else {"order": order}
        return {"drawn": self.drawn, "batch_prompts": self.batch_prompts, **where, **streamed}

    def load_state_dict(self, state: Mapping[str, Any], place: int | None = None, *, cut: bool = False) -> None:
        """Restore the position of a `state_dict`, also with a different `batch_prompts`.

        Args:
            state: the result of `state_dict`.
            place: place of the next prompt if prompts were taken one by one; None: after the drawn batches.
            cut: whether prompts will be taken one by one, so that `place` need not be the start of a batch.

        Raises:
            CheckpointError: the dataset has a different number of rows, and so a different order; or no batch of this
                size starts at the position.
        """
        rows = self.dataset.size or 0  # 0: unknown
        if state["rows"] != rows:
            raise CheckpointError(
                f"data: the dataset has {rows} rows, but the checkpoint was written with {state['rows']}. "
                "Restore the earlier dataset, or set resume_skip=[data] to start at the first row."
            )
        place = state["drawn"] * state["batch_prompts"] if place is None else place
        if place % self.batch_prompts and not cut:
            raise CheckpointError(
                f"batch_prompts={self.batch_prompts}: the checkpoint was written after {place} prompts "
                f"({state['drawn']} batches of {state['batch_prompts']}), which is not a multiple of it. Set another "
                "batch_prompts, or resume_skip=[data] to start at the first row."
            )
        # rounded up, because with `cut` the place may lie within a batch
        self.drawn = -(-place // self.batch_prompts)
        if "order" in state:
            self.order.load_state_dict(state["order"])

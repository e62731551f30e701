"""`PromptStream`: the training prompts in order, with the data position of the run as a single number."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from realign.api import SequenceSample
from realign.api.rewards import episode_rewards
from realign.api.sample import with_own_metadata, with_response_index
from realign.data import Dataset
from realign.data.curriculum import Curriculum, CurriculumOrder
from realign.data.order import FRUITLESS, RowOrder
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
            whole data position of a resumed run. For streamed data, the state also contains positions in the files,
            and with a curriculum the pass rates of the rows.
        curriculum: chooses the rows by the rewards so far; None takes each row once per epoch.
    """

    dataset: Dataset
    batch_prompts: int
    seed: int
    shuffle: bool
    drawn: int = 0
    curriculum: Curriculum | None = None
    _places: dict[Hashable, int] = field(default_factory=dict, init=False, repr=False)
    """With a curriculum: places of the prompts whose rewards are not recorded yet, by id."""

    @cached_property
    def order(self) -> RowOrder:
        """The rows at the places of the stream."""
        if self.curriculum is not None:
            return CurriculumOrder(self.curriculum, self.dataset, self.seed, self.shuffle)
        return self.dataset.order(self.seed, self.shuffle)

    def places(self, number: int) -> range:
        """Return the places of a batch (counted from 0)."""
        return range(number * self.batch_prompts, (number + 1) * self.batch_prompts)

    def rows(self, number: int) -> list[tuple[int, Any]]:
        """Return (epoch, row) of each prompt of a batch (counted from 0).

        Depends only on seed and number; with a curriculum, also on the rewards that were recorded before.
        """
        return self.order.rows(self.places(number))

    def preview(self, places: Sequence[int]) -> SequenceSample:
        """Return the prompts that would be at these places without a curriculum."""
        order = self.order.usual if isinstance(self.order, CurriculumOrder) else self.order
        return with_own_metadata(with_response_index(self.dataset.sample(order.rows(places))))

    def at(self, places: Sequence[int]) -> SequenceSample:
        """Return the prompts at these places of the stream, counted from the start of the first epoch.

        With a curriculum, metadata `pass_rate` is the rolling pass rate of each prompt, None if it has none.
        """
        return self._sample(places, self.order.rows(places))

    def _sample(self, places: Sequence[int], rows: Sequence[tuple[int, Any]]) -> SequenceSample:
        sample = with_response_index(self.dataset.sample(rows))
        if not isinstance(self.order, CurriculumOrder):
            return sample
        self._places |= zip(sample.ids, places, strict=True)
        return sample.with_metadata(pass_rate=self.order.pass_rates(places))

    def draw(self) -> SequenceSample:
        """Return the next batch."""
        self.drawn += 1
        return self.at(self.places(self.drawn - 1))

    def draw_new(self, used: set[Any]) -> SequenceSample | None:
        """Return the next batch without the rows in `used`, and add its rows to `used`; None when no other row comes.

        Used rows can reappear at the border of two epochs. Batches that contain only used rows are skipped, but not
        forever: other rows may belong to a source whose weight has fallen to 0.
        """
        for _ in range(-(-FRUITLESS * max(len(used), 100) // self.batch_prompts)):
            if self.order.is_exhausted(used):
                break
            new = {}
            for place, (epoch, row) in zip(self.places(self.drawn), self.rows(self.drawn), strict=True):
                if row not in used:
                    used.add(row)
                    new[place] = epoch, row
                elif isinstance(self.order, CurriculumOrder):
                    self.order.record(place, np.zeros(0))
            self.drawn += 1
            if new:
                return self._sample(list(new), list(new.values()))
        return None

    def record(self, scored: SequenceSample) -> None:
        """Tell the curriculum, if there is one, the rewards of prompts that were drawn."""
        if not isinstance(self.order, CurriculumOrder):
            return
        groups = [np.zeros(0)] * len(scored)
        if "rewards" in scored:
            rewards_S = episode_rewards(scored).double().cpu().numpy()
            groups = np.split(rewards_S, np.cumsum(scored.lengths["rewards"].counts)[:-1])
        for id_, rewards_G in zip(scored.ids, groups, strict=True):
            # a replay of asynchronous rollout takes its prompts from the records of the run
            if (place := self._places.pop(id_, None)) is not None:
                self.order.record(place, rewards_G)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in batches, and for display also as epoch and index within the epoch."""
        place, rows = self.drawn * self.batch_prompts, self.dataset.size
        epoch, index = (0, place) if rows is None else divmod(place, rows)
        where = {"epoch": epoch, "index": index, "seed": self.seed, "rows": rows or 0}
        order = self.order.state_dict()
        own = {} if order is None else {"order" if self.curriculum is None else "curriculum": order}
        return {"drawn": self.drawn, "batch_prompts": self.batch_prompts, **where, **own}

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
        if isinstance(self.order, CurriculumOrder):
            if "curriculum" in state:
                self.order.load_state_dict(state["curriculum"])
            else:
                self.order.start_at(place)
        elif "order" in state:
            self.order.load_state_dict(state["order"])

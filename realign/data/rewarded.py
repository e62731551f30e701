"""Responses with rewards: prompts with one response each, and a number that says how good it is, as ILQL uses them."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

from realign.api.lengths import IntArray
from realign.api.sample import SequenceSample
from realign.data.collect import Collected
from realign.data.dataset import LoadReport
from realign.data.messages import short
from realign.data.unpaired import UnpairedData, UnpairedDataset
from realign.errors import DataError


@dataclass
class RewardedData(UnpairedData):
    """A file of prompts, each with one response and its reward (config node).

    Without column settings, a row has the columns `prompt`, `completion` (or `response`) and `reward`. Responses are
    tokenized as in `SupervisedData`.
    """

    label_column: str = "reward"
    """Column with the reward of the whole response, a finite number."""

    def read_label(self, label: Any) -> float:
        """Return the reward.

        Raises:
            DataError: it is not a finite number.
        """
        try:
            reward = float(label)
        except (TypeError, ValueError):
            reward = math.nan
        if not math.isfinite(reward):
            raise DataError(f"the reward is {short(label)}; expected a finite number.")
        return reward

    def pack(self, found: Collected, report: LoadReport) -> RewardedDataset:
        """See `DataSource`."""
        return RewardedDataset(found.tokens, report, found.lengths, found.trained, found.labels, mixture=found.mixture)


@dataclass(frozen=True, eq=False)
class RewardedDataset(UnpairedDataset):
    """Responses with rewards in memory, one per prompt.

    Keys per token are `input_ids`, `prompt_mask` and `loss_mask`; the key per sequence is `rewards` [S] (fp32).
    """

    keys: ClassVar[tuple[str, ...]] = ("input_ids", "prompt_mask", "loss_mask", "rewards")

    def _sample(self, rows: IntArray, ids: tuple[Hashable, ...]) -> SequenceSample:
        return super()._sample(rows, ids).rename({"labels": "rewards"})


__all__ = ["RewardedData", "RewardedDataset"]

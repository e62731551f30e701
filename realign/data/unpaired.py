"""Prompts with one response each, and whether it is desirable (for KTO) or its reward (for ILQL)."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from realign.api.lengths import IntArray
from realign.api.sample import SequenceSample
from realign.data.columns import Row, overlap, pair_or_conversation
from realign.data.data_source import ResponseSource
from realign.data.dataset import Collected, LoadReport, SequenceDataset
from realign.data.encoding import RowText
from realign.data.messages import short, split_last
from realign.data.writer import Writer
from realign.errors import DataError, SettingsError

_TAG = "kto_tag"
"""Column with the label in LLaMA-Factory."""
_TEXT_LABELS = {"true": 1, "false": 0, "1": 1, "0": 0}
"""Labels of CSV files, whose values are text."""


@dataclass
class UnpairedData(ResponseSource):
    """A file of prompts, each with one response and whether it is desirable.

    Without column settings, a row has the columns `prompt`, `completion` (or `response`) and `label`, or a whole
    conversation, whose last message is the response, and `label`. Responses are tokenized as in `SupervisedData`.
    Samples have `input_ids`, `prompt_mask` and `loss_mask` per token, and `labels`
    per sequence (1 desirable, 0 undesirable).
    """

    response_column: str | None = None
    """Column with the response: a string or a list of chat messages. null recognizes `completion` or `response`."""
    label_column: str = "label"
    """Column with the label: true or 1 (desirable), false or 0 (undesirable)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if message := overlap({"prompt_column": self.prompt_column, "response_column": self.response_column}):
            raise SettingsError(message)

    @override
    def columns(self, row: Row) -> dict[str, str]:
        missing = {"prompt_column": self.prompt_column or "prompt", "response_column": "completion"}
        label = self.label_column
        if label == "label" and label not in row and _TAG in row:
            label = _TAG
        return (pair_or_conversation(row, self.prompt_column, self.response_column) or missing) | {
            "label_column": label
        }

    @override
    def text_of(self, row: Row, writer: Writer) -> RowText:
        values = self.values(row)
        if "messages_column" in values:
            prompt, response = split_last(values["messages_column"])
        else:
            prompt, response = values["prompt_column"], values["response_column"]
        written = writer.response(prompt, response, self.context(row))
        return RowText(row, written, [self.read_label(values["label_column"])])

    def read_label(self, label: Any) -> float:
        """Return the number of a label.

        Raises:
            DataError: the label is neither true nor false.
        """
        value = _TEXT_LABELS.get(label.strip().lower(), label) if isinstance(label, str) else label
        if value not in (0, 1):
            raise DataError(f"the label is {short(label)}; expected true or false.")
        return float(value)

    @override
    def pack(self, collected: Collected, report: LoadReport) -> UnpairedDataset:
        return UnpairedDataset.of(collected, report, labels=collected.labels)


@dataclass(frozen=True, eq=False)
class UnpairedDataset(SequenceDataset):
    """Labeled responses in memory, one per prompt.

    Keys per token are `input_ids`, `prompt_mask` and `loss_mask`; the key per sequence is `labels` [S] (fp32), 1 for a
    desirable and 0 for an undesirable response.
    """

    keys: ClassVar[tuple[str, ...]] = ("input_ids", "prompt_mask", "loss_mask", "labels")

    labels: npt.NDArray[np.float32]

    @override
    def _sample(self, rows: IntArray, ids: tuple[Hashable, ...]) -> SequenceSample:
        sequences, _ = self.lengths.sequences_of(rows)
        return super()._sample(rows, ids).with_sequences(labels=torch.from_numpy(self.labels[sequences]))


@dataclass
class RewardedData(UnpairedData):
    """A file of prompts, each with one response and its reward.

    Without column settings, a row has the columns `prompt`, `completion` (or `response`) and `reward`. Responses are
    tokenized as in `SupervisedData`. Samples have `input_ids`, `prompt_mask` and `loss_mask` per token, and `rewards`
    per sequence.
    """

    label_column: str = "reward"
    """Column with the reward of the whole response, a finite number."""

    @override
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

    @override
    def pack(self, collected: Collected, report: LoadReport) -> RewardedDataset:
        return RewardedDataset.of(collected, report, labels=collected.labels)


@dataclass(frozen=True, eq=False)
class RewardedDataset(UnpairedDataset):
    """Responses with rewards in memory, one per prompt.

    Keys per token are `input_ids`, `prompt_mask` and `loss_mask`; the key per sequence is `rewards` [S] (fp32).
    """

    keys: ClassVar[tuple[str, ...]] = ("input_ids", "prompt_mask", "loss_mask", "rewards")

    @override
    def _sample(self, rows: IntArray, ids: tuple[Hashable, ...]) -> SequenceSample:
        return super()._sample(rows, ids).rename({"labels": "rewards"})

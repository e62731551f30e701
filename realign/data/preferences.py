"""Preference data: prompts with several labeled responses, for reward models and DPO."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from realign.api.lengths import IntArray
from realign.api.sample import SequenceSample
from realign.data.columns import (
    CHOSEN,
    CONVERSATIONS,
    PROMPTS,
    REJECTED,
    RESPONSES,
    Context,
    Row,
    is_given,
    only_one,
    overlap,
)
from realign.data.data_source import ResponseSource
from realign.data.dataset import Collected, LoadReport, SequenceDataset
from realign.data.encoding import DroppedRow, RowText
from realign.data.messages import short, split_last
from realign.data.writer import Writer, Written
from realign.errors import DataError, SettingsError

_SEVERAL = ("responses", "completions")
"""Columns with several responses."""
LABELS = ("labels", "scores", "ratings")
"""Columns with the labels or ratings of several responses."""
_RESPONSE_KEYS = ("response", "text", "content")
"""Keys with the text of a response that is an object."""
_RATING_KEYS = ("overall_score", "score", "rating")
"""Keys with the rating of a response that is an object."""


class LabelKind(StrEnum):
    """Meaning of the labels of the responses to a prompt."""

    pairs = "pairs"
    """A chosen and a rejected response, or lists of both, or rated responses; labels are 1, 0, 1, 0, ..."""
    best_of_n = "best_of_n"
    """Columns `responses` and `labels`: one label is 1, all others are 0."""
    scalar_rating = "scalar_rating"
    """Columns `responses` and `labels`: the label is the rating of a response."""
    scalar_compare = "scalar_compare"
    """Columns `responses` and `labels`: neighbors form pairs; the difference of their labels is the rating."""


class RatedPairs(StrEnum):
    """Pairs that are formed from rated responses."""

    best_worst = "best_worst"
    """One pair: the best rated response and the worst."""
    all = "all"
    """All pairs with different ratings."""


@dataclass
class PreferenceData(ResponseSource):
    """A file of prompts with labeled responses.

    With kind=pairs, a row has columns `chosen` and `rejected`: strings, lists of chat messages, or lists of several of
    them. Messages may be the responses only, or whole conversations. Without a column `prompt`, the prompt is the
    common start of both: messages, or the text up to the last common `Assistant:` as in HH-RLHF. A row without
    `chosen` may instead have rated responses (columns `responses` and `labels`, `scores` or `ratings`; or `completions`
    with objects, as in UltraFeedback).

    Every response is tokenized as in `SupervisedData`, after the same prompt. A row is one prompt of a batch; its
    responses are the sequences. Pairs of equal responses are dropped. Their gradient is rounding noise, which Adam
    would scale up to full steps. Rows without any other pair are dropped and counted.
    """

    prompt_column: str | None = None
    """Column with the prompt: a string or a list of chat messages. null uses the column `prompt` if a row has it; ""
    takes the prompt from the start of the responses (kind=pairs)."""
    kind: LabelKind = LabelKind.pairs
    """What the labels mean: pairs (chosen and rejected) | best_of_n (the best one has label 1) | scalar_rating
    (a rating of each response) | scalar_compare (neighbors are pairs, and their labels differ by the rating)."""
    chosen_column: str | None = None
    """Column with the preferred response, or a list of responses (kind=pairs). null uses `chosen`."""
    rejected_column: str | None = None
    """Column with the rejected response, or a list of responses (kind=pairs). null uses `rejected`."""
    margin_column: str | None = None
    """Column with the preference margin of the chosen response, or a list of margins (kind=pairs). null uses 0, or the
    difference of ratings."""
    responses_column: str | None = None
    """Column with a list of responses. null recognizes it. `completions.*.response` selects an item of each element."""
    labels_column: str | None = None
    """Column with the labels or ratings of the responses, a list of numbers. null recognizes it."""
    rated_pairs: RatedPairs = RatedPairs.best_worst
    """Pairs of rated responses (kind=pairs): best_worst (the best rated and the worst) | all (with different
    ratings)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.margin_column is not None and self.kind is not LabelKind.pairs:
            raise SettingsError(
                f"margin_column={self.margin_column!r}: requires kind=pairs, but kind={self.kind.value}. "
                "Set kind=pairs, or margin_column=null."
            )
        named = ("prompt_column", "chosen_column", "rejected_column", "responses_column")
        if message := overlap({name: getattr(self, name) or None for name in named}):
            raise SettingsError(message)
        pair = self.chosen_column or self.rejected_column or self.margin_column
        if pair is not None and self.responses_column is not None:
            raise SettingsError(
                f"responses_column={self.responses_column!r}: conflicts with chosen_column, rejected_column and "
                "margin_column. Set either."
            )

    @override
    def columns(self, row: Row) -> dict[str, str]:
        if self._is_rated(row):
            prompt = self.prompt_column if self.prompt_column is not None else only_one(row, PROMPTS, "prompt_column")
            return ({"prompt_column": prompt or "prompt"} if prompt != "" else {}) | self._rated_columns(row)
        rejected = self.rejected_column or only_one(row, REJECTED, "rejected_column") or "rejected"
        chosen = self.chosen_column or only_one(row, CHOSEN, "chosen_column")
        if chosen is None and rejected in REJECTED[2:]:
            chosen = only_one(row, (*RESPONSES, *CONVERSATIONS), "chosen_column")
        margin = {} if self.margin_column is None else {"margin_column": self.margin_column}
        pair = {"chosen_column": chosen or "chosen", "rejected_column": rejected}
        if chosen in CONVERSATIONS and rejected == REJECTED[2]:
            return {"messages_column": chosen, "rejected_column": rejected} | margin
        if chosen == CHOSEN[1] and self.prompt_column is None:
            given = row["input"] if isinstance(row.get("input"), Mapping) else {}
            tools = {"tools_column": "input.tools"} if is_given(given.get("tools")) else {}
            return {"prompt_column": "input.messages"} | pair | tools | margin
        prompt = self.prompt_column
        if prompt is None:
            prompts = (*PROMPTS, *CONVERSATIONS) if _is_answer(row.get(pair["chosen_column"])) else PROMPTS
            prompt = only_one(row, prompts, "prompt_column")
        return ({"prompt_column": prompt} if prompt else {}) | pair | margin

    def _is_rated(self, row: Row) -> bool:
        """Return whether a row has responses with labels, instead of chosen and rejected ones."""
        if self.kind is not LabelKind.pairs or self.responses_column is not None:
            return True
        pair = (self.chosen_column, self.rejected_column, self.margin_column) != (None, None, None)
        return not pair and not any(name in row for name in CHOSEN) and any(name in row for name in _SEVERAL)

    def _rated_columns(self, row: Row) -> dict[str, str]:
        responses = self.responses_column or only_one(row, _SEVERAL, "responses_column") or "responses"
        labels = self.labels_column
        items = row.get(responses)
        if isinstance(items, list) and items and isinstance(items[0], Mapping) and "role" not in items[0]:
            if labels is None and (rating := only_one(items[0], _RATING_KEYS, "labels_column")):
                labels = f"{responses}.*.{rating}"
            if text := only_one(items[0], _RESPONSE_KEYS, "responses_column"):
                responses = f"{responses}.*.{text}"
        labels = labels or only_one(row, LABELS, "labels_column") or "labels"
        return {"responses_column": responses, "labels_column": labels}

    @override
    def text_of(self, row: Row, writer: Writer) -> RowText | DroppedRow:
        values, context = self.values(row), self.context(row)
        prompt = values.get("prompt_column")
        if "messages_column" in values:
            prompt, values["chosen_column"] = split_last(values["messages_column"])
        if "chosen_column" in values:
            return self._pairs(row, writer, prompt, context, values)
        if prompt is None:
            raise DataError("prompt_column='': responses with labels need a prompt. Set prompt_column.")
        responses, labels = values["responses_column"], values["labels_column"]
        if not isinstance(responses, list) or not responses:
            raise DataError(f"the responses are {short(responses)}; expected a list of strings or chat messages.")
        numbers = _numbers("labels", labels, len(responses))
        written = [writer.response(prompt, response, context)[0] for response in responses]
        if self.kind is LabelKind.pairs:
            return self._pair_rated(row, written, numbers)
        _check_labels(self.kind, numbers, labels)
        return RowText(row, written, numbers, [0.0] * len(numbers))

    def _pairs(self, row: Row, writer: Writer, prompt: Any, context: Context, values: Mapping[str, Any]) -> RowText:
        chosen, rejected, margin = (values.get(f"{name}_column") for name in ("chosen", "rejected", "margin"))
        # LLaMA-Factory has one message as an object, and ms-swift one answer as text beside a conversation
        chosen, rejected = ([x] if isinstance(x, Mapping) else x for x in (chosen, rejected))
        if isinstance(chosen, list) and isinstance(rejected, str):
            rejected = [{"role": "assistant", "content": rejected}]
        # a list of responses, instead of one response: a string or a list of messages
        several = isinstance(chosen, list) and not (chosen and isinstance(chosen[0], Mapping))
        better, worse = (chosen, rejected) if several else ([chosen], [rejected])
        if not isinstance(better, list) or not isinstance(worse, list) or len(better) != len(worse) or not better:
            raise DataError(
                f"chosen and rejected must be strings, or lists of equal length; found {better!r} and {worse!r}."
            )
        n = len(better)
        margins = [0.0] * n if margin is None else _numbers("margins", margin if several else [_number(margin)], n)
        both = [writer.comparison(prompt, *pair, context) for pair in zip(better, worse, strict=True)]
        written = [text for pair in both for text in pair]
        return RowText(row, written, [1.0, 0.0] * n, [m for m in margins for _ in range(2)], pairs=True)

    def _pair_rated(self, row: Row, written: list[Written], ratings: list[float]) -> RowText | DroppedRow:
        """Return pairs of rated responses, with the difference of their ratings as the margin."""
        # The sort is stable: of equally rated responses, the first in the row is the best, and the last the worst.
        order = sorted(range(len(ratings)), key=lambda i: -ratings[i])
        pairs = [(order[0], order[-1])] if self.rated_pairs is RatedPairs.best_worst else combinations(order, 2)
        ranked = [(best, worst) for best, worst in pairs if ratings[best] > ratings[worst]]
        if not ranked:
            return DroppedRow("all responses have the same rating")
        margins = [ratings[best] - ratings[worst] for best, worst in ranked]
        return RowText(
            row,
            [written[i] for pair in ranked for i in pair],
            [1.0, 0.0] * len(ranked),
            [margin for margin in margins for _ in range(2)],
            pairs=True,
        )

    @override
    def pack(self, collected: Collected, report: LoadReport) -> PreferenceDataset:
        return PreferenceDataset.of(collected, report, labels=collected.labels, margins=collected.margins)


def _is_answer(chosen: Any) -> bool:
    """Return whether a chosen response is the response alone, so that another column has the prompt."""
    if not isinstance(chosen, list):
        return isinstance(chosen, Mapping) or (isinstance(chosen, str) and "Assistant:" not in chosen)
    first = chosen[0] if chosen else None
    return isinstance(first, Mapping) and (first.get("role") == "assistant" or first.get("from") == "gpt")


def _check_labels(kind: LabelKind, numbers: list[float], labels: Any) -> None:
    if kind is LabelKind.best_of_n and (sorted(numbers) != [0.0] * (len(numbers) - 1) + [1.0] or len(numbers) < 2):
        raise DataError(f"the labels are {labels!r}; kind=best_of_n needs one label 1, and 0 for all others.")
    if kind is LabelKind.scalar_compare and len(numbers) % 2:
        raise DataError(f"kind=scalar_compare needs an even number of responses, found {len(numbers)}.")


def _number(value: Any) -> Any:
    """Return the number that a text contains, since all values of CSV files are text; other values unchanged."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _numbers(name: str, values: Any, n: int) -> list[float]:
    plain = isinstance(values, list) and all(isinstance(x, int | float) and math.isfinite(x) for x in values)
    if not plain or len(values) != n:
        raise DataError(f"the {name} are {values!r}; expected {n} finite numbers.")
    return [float(x) for x in values]


@dataclass(frozen=True, eq=False)
class PreferenceDataset(SequenceDataset):
    """Labeled responses in memory.

    Keys per token are `input_ids`, `prompt_mask` and `loss_mask`; keys per sequence are `labels` and `margins`.
    """

    keys: ClassVar[tuple[str, ...]] = ("input_ids", "prompt_mask", "loss_mask", "labels", "margins")

    labels: npt.NDArray[np.float32]
    margins: npt.NDArray[np.float32]

    @override
    def _sample(self, rows: IntArray, ids: tuple[Hashable, ...]) -> SequenceSample:
        sequences, _ = self.lengths.sequences_of(rows)
        labels, margins = (torch.from_numpy(values[sequences]) for values in (self.labels, self.margins))
        return super()._sample(rows, ids).with_sequences(labels=labels, margins=margins)

"""Preference data: prompts with several labeled responses, for reward models and DPO."""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import compress, islice
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from realign.api.lengths import IntArray, Lengths
from realign.api.sample import SequenceSample
from realign.data.dataset import PackedDataset, PackedTokens
from realign.data.files import Table
from realign.data.source import DataSource, LengthLimit, each_row
from realign.data.templates import Ending, Writer, encode
from realign.errors import DataError, SettingsError
from realign.settings import Count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LabelKind(StrEnum):
    """Format of the preference labels in a row."""

    pairs = "pairs"
    """Columns `chosen` and `rejected`: strings, or lists of equal length; labels are 1, 0, 1, 0, ..."""
    best_of_n = "best_of_n"
    """Columns `responses` and `labels`: one label is 1, all others are 0."""
    scalar_rating = "scalar_rating"
    """Columns `responses` and `labels`: the label is the rating of a response."""
    scalar_compare = "scalar_compare"
    """Columns `responses` and `labels`: neighbors form pairs; the difference of their labels is the rating."""


class _Judged(NamedTuple):
    """The prompt, responses, labels and margins of one row, as text and numbers."""

    prompt: str
    responses: list[str]
    labels: list[float]
    margins: list[float]


@dataclass
class PreferenceData(DataSource):
    """A file of prompts with labeled responses (config node).

    Every response is tokenized as in `SupervisedData`, after the same prompt. A row is one prompt of a batch; its
    responses are the sequences. Pairs of equal responses are dropped. Their gradient is rounding noise, which Adam
    would scale up to full steps. Rows without any other pair are dropped and counted.
    """

    kind: LabelKind = LabelKind.pairs
    """Format of the labels: pairs | best_of_n | scalar_rating | scalar_compare."""
    chosen_column: str = "chosen"
    """Column with the preferred response, or a list of responses (kind=pairs)."""
    rejected_column: str = "rejected"
    """Column with the rejected response, or a list of responses (kind=pairs)."""
    margin_column: str | None = None
    """Column with the preference margin of the chosen response, or a list of margins (kind=pairs); null uses 0."""
    responses_column: str = "responses"
    """Column with the responses, a list of strings (other kinds)."""
    labels_column: str = "labels"
    """Column with the labels, a list of numbers (other kinds)."""
    max_tokens: Count | None = None
    """Maximum length in tokens of prompt plus longest response of a row; null sets no limit. Responses are never
    truncated, and all responses of a row share the same truncated prompt."""
    append_eos: bool = True
    """Append the tokenizer's EOS token to each response that does not already end with it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.margin_column is not None and self.kind is not LabelKind.pairs:
            raise SettingsError(
                f"margin_column={self.margin_column!r}: requires kind=pairs, but kind={self.kind.value}. "
                "Set kind=pairs, or margin_column=null."
            )

    def column_settings(self) -> list[str]:
        """See `FileSource`."""
        own = ["responses_column", "labels_column"]
        if self.kind is LabelKind.pairs:
            own = ["chosen_column", "rejected_column", *(["margin_column"] if self.margin_column is not None else [])]
        return [*super().column_settings(), *own]

    def load(self, tokenizer: PreTrainedTokenizerBase) -> PreferenceDataset:
        """Read the file and tokenize it.

        Raises:
            DataError: a row is invalid (names its file and line), or no row is left.
            ConfigError: the tokenizer does not support a setting.
        """
        end, writer = Ending(tokenizer, self.append_eos), self.writer(tokenizer)
        start = writer.start()
        limit = LengthLimit("max_tokens", self.max_tokens, self.too_long, len(start))
        table = self.read(tokenizer)
        judged = self._judged(table, writer)
        counts, prompt_lengths, lengths = array("q"), array("q"), array("q")
        labels, margins = array("f"), array("f")
        undecided = 0

        def kept() -> Iterator[list[int]]:
            nonlocal undecided
            prompts = encode(tokenizer, [row.prompt for row in judged], start)
            encoded = encode(tokenizer, [response for row in judged for response in row.responses])
            for index, (row, prompt) in enumerate(zip(judged, prompts, strict=True)):
                responses = [end(ids) for ids in islice(encoded, len(row.responses))]
                shortest = min(map(len, responses))
                if not shortest or len(prompt) + shortest < 2:
                    raise DataError(f"{table.where(index)}: a response has no token to train on.")
                says = self._says_something(responses)
                if not any(says):
                    undecided += 1
                    continue
                responses = list(compress(responses, says))
                fitting = limit.fit(prompt, table.where(index), max(map(len, responses)))
                if fitting is not None:
                    counts.append(len(responses))
                    prompt_lengths.append(len(fitting))
                    lengths.extend(len(fitting) + len(ids) for ids in responses)
                    labels.extend(compress(row.labels, says))
                    margins.extend(compress(row.margins, says))
                    yield [token for ids in responses for token in (*fitting, *ids)]

        tokens = PackedTokens.pack(kept())
        return PreferenceDataset(
            tokens,
            limit.report(table, tokens, {"chosen equals rejected": undecided} if undecided else {}),
            Lengths(np.array(counts, dtype=np.int64), np.array(lengths, dtype=np.int64)),
            np.array(prompt_lengths, dtype=np.int64),
            np.array(labels, dtype=np.float32),
            np.array(margins, dtype=np.float32),
        )

    def _says_something(self, responses: list[list[int]]) -> list[bool]:
        """Return for each response whether to keep it: with kind=pairs, whether the responses of its pair differ."""
        if self.kind is not LabelKind.pairs:
            return [True] * len(responses)
        both = zip(responses[::2], responses[1::2], strict=True)
        return [chosen != rejected for chosen, rejected in both for _ in range(2)]

    def _judged(self, table: Table, writer: Writer) -> list[_Judged]:
        """Return the rows as text, each validated against `kind`."""
        prompts = table.column(self.prompt_column)
        if self.kind is LabelKind.pairs:
            chosen, rejected = table.column(self.chosen_column), table.column(self.rejected_column)
            margins = table.column(self.margin_column) if self.margin_column is not None else [None] * len(table)

            def read(i: int) -> tuple[list[Any], list[float], list[float]]:
                return _pairs(chosen[i], rejected[i], margins[i])
        else:
            responses, labels = table.column(self.responses_column), table.column(self.labels_column)

            def read(i: int) -> tuple[list[Any], list[float], list[float]]:
                return _labelled(self.kind, responses[i], labels[i])

        def write(i: int) -> _Judged:
            found, row_labels, row_margins = read(i)
            texts = [writer.pair(prompts[i], response) for response in found]
            return _Judged(texts[0][0], [response for _, response in texts], row_labels, row_margins)

        return each_row(table, write)


def _pairs(chosen: Any, rejected: Any, margin: Any) -> tuple[list[Any], list[float], list[float]]:
    several = isinstance(chosen, list)
    chosen, rejected = (chosen, rejected) if several else ([chosen], [rejected])
    if not isinstance(rejected, list) or len(chosen) != len(rejected) or not chosen:
        raise DataError(
            f"chosen and rejected must be strings, or lists of equal length; found {chosen!r} and {rejected!r}."
        )
    given = [0.0] * len(chosen) if margin is None else _numbers("margins", margin if several else [margin], len(chosen))
    responses = [response for pair in zip(chosen, rejected, strict=True) for response in pair]
    return responses, [1.0, 0.0] * len(chosen), [m for m in given for _ in range(2)]


def _labelled(kind: LabelKind, responses: Any, labels: Any) -> tuple[list[Any], list[float], list[float]]:
    if not isinstance(responses, list) or not responses:
        raise DataError(f"the responses are {responses!r}; expected a list of strings.")
    numbers = _numbers("labels", labels, len(responses))
    if kind is LabelKind.best_of_n and (sorted(numbers) != [0.0] * (len(numbers) - 1) + [1.0] or len(numbers) < 2):
        raise DataError(f"the labels are {labels!r}; kind=best_of_n needs one label 1, and 0 for all others.")
    if kind is LabelKind.scalar_compare and len(numbers) % 2:
        raise DataError(f"kind=scalar_compare needs an even number of responses, found {len(numbers)}.")
    return responses, numbers, [0.0] * len(numbers)


def _numbers(name: str, values: Any, n: int) -> list[float]:
    plain = isinstance(values, list) and all(isinstance(x, int | float) and math.isfinite(x) for x in values)
    if not plain or len(values) != n:
        raise DataError(f"the {name} are {values!r}; expected {n} finite numbers.")
    return [float(x) for x in values]


@dataclass(frozen=True, eq=False)
class PreferenceDataset(PackedDataset):
    """Labeled responses in memory.

    Keys per token are `input_ids`, `prompt_mask` and `loss_mask`; keys per sequence are `labels` and `margins`. A row
    stores the tokens of all its sequences, concatenated. `report.longest` is the length of the longest row, which a
    micro-batch must fit.
    """

    keys: ClassVar[tuple[str, ...]] = ("input_ids", "prompt_mask", "loss_mask", "labels", "margins")

    lengths: Lengths
    prompt_lengths: IntArray
    labels: npt.NDArray[np.float32]
    margins: npt.NDArray[np.float32]

    @property
    def longest_sequence(self) -> int:
        """Length in tokens of the longest sequence (prompt plus response)."""
        return int(self.lengths.flat.max(initial=0))

    def _sample(self, rows: IntArray, ids: tuple[Hashable, ...]) -> SequenceSample:
        tokens_T, _ = self.tokens.gather(rows)
        sequences, counts = self.lengths.sequences_of(rows)
        lengths = Lengths(counts, self.lengths.flat[sequences])
        position_T = np.arange(lengths.total) - np.repeat(lengths.starts[:-1], lengths.flat)
        prompt_S = np.repeat(self.prompt_lengths[rows], counts)
        prompt_T = torch.from_numpy(position_T < np.repeat(prompt_S, lengths.flat))
        data = {
            "input_ids": tokens_T,
            "prompt_mask": prompt_T,
            "loss_mask": ~prompt_T & torch.from_numpy(position_T > 0),
        }
        return SequenceSample(ids, data, dict.fromkeys(data, lengths)).with_sequences(
            labels=torch.from_numpy(self.labels[sequences]), margins=torch.from_numpy(self.margins[sequences])
        )

"""Prompt data for generation."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from realign.api.lengths import IntArray
from realign.api.sample import SequenceSample
from realign.data.columns import CONVERSATIONS, PROMPTS, Row, has, is_part, only_one
from realign.data.combined import WithPretraining
from realign.data.data_source import DataSource, ImageSource
from realign.data.dataset import Collected, DataSpec, LoadReport, PackedDataset, PackedTokens
from realign.data.encoding import LengthLimit, RowText
from realign.data.messages import read_conversation
from realign.data.writer import Writer
from realign.errors import DataError, SettingsError
from realign.settings import Count


@dataclass
class PromptData(ImageSource):
    """A file of prompts. Samples also contain the whole row, for the reward function.

    Without column settings, the prompt is the column `prompt` (or `instruction`, `query`), or the column `messages` (or
    `conversations`, `conversation`), a conversation that ends with a user or tool message. If the last message of a
    prompt is by the assistant, it is the start of the answer, which the model continues, as in TRL.
    """

    keeps_rows: ClassVar[bool] = True

    messages_column: str | None = None
    """Column with conversations (lists of chat messages). null finds it by name."""
    drop_final_answer: bool = False
    """Cut the assistant messages at the end of a prompt or conversation, so that it ends with the last user or tool
    message; the reward function still sees them in the row. With false, the model continues the last message of a
    prompt, and such a conversation is an error."""
    max_prompt_tokens: Count | None = None
    """Longest allowed prompt in tokens, including start tokens; null sets no limit. `too_long` says what happens to
    longer ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.messages_column is not None and self.prompt_column is not None:
            raise SettingsError(
                f"prompt_column={self.prompt_column!r}: conflicts with messages_column={self.messages_column!r}. Set "
                "one of them."
            )

    @override
    def columns(self, row: Row) -> dict[str, str]:
        if self.messages_column is not None:
            return {"messages_column": self.messages_column}
        if self.prompt_column is not None:
            return {"prompt_column": self.prompt_column}
        prompt = only_one(row, PROMPTS, "prompt_column")
        conversation = only_one(row, CONVERSATIONS, "messages_column")
        if conversation is None or not has(row, conversation):
            return {"prompt_column": prompt or "prompt"}
        if prompt is None or not has(row, prompt):
            return {"messages_column": conversation}
        if is_part(row, conversation, prompt):
            return {"prompt_column": prompt}
        raise DataError(
            f"the columns {prompt!r} and {conversation!r} both fit, and the one is not in the other. Set "
            f"prompt_column={prompt} or messages_column={conversation}."
        )

    @override
    def text_of(self, row: Row, writer: Writer) -> RowText:
        ((setting, value),) = self.values(row).items()
        if setting == "messages_column" and not isinstance(value, list):
            column = self.columns(row)[setting]
            raise DataError(f"column {column!r} contains a {type(value).__name__}; expected a list of chat messages.")
        if self.drop_final_answer or setting == "messages_column":
            value = self._drop_answers(value)
        return RowText(row, [writer.prompt(value, self.context(row))])

    def _drop_answers(self, value: Any) -> Any:
        """Return a conversation without the assistant messages at its end.

        Raises:
            DataError: it ends with an assistant message, and `drop_final_answer` is false.
        """
        if not isinstance(value, list) or not value:
            return value
        messages = read_conversation(value, images=self.has_images).messages
        end = next((i for i in range(len(messages), 0, -1) if messages[i - 1]["role"] != "assistant"), 0)
        if end < len(messages) and not self.drop_final_answer:
            raise DataError(
                "the conversation ends with an assistant message, but a prompt ends with a user or tool message. Set "
                "drop_final_answer=true to remove the assistant messages at the end, or set prompt_column instead of "
                "messages_column if the last one is the start of the answer, which the model continues."
            )
        return value[:end]

    @override
    def length_limit(self) -> LengthLimit:
        return LengthLimit("max_prompt_tokens", self.max_prompt_tokens, self.too_long)

    @override
    def pack(self, collected: Collected, report: LoadReport) -> PromptDataset:
        return PromptDataset(
            collected.tokens, report, collected.rows, mixture=collected.mixture, images=collected.images
        )


@dataclass(frozen=True, eq=False)
class PromptDataset(PackedDataset):
    """Prompts in memory: key `prompt_ids`, and metadata `row`, the row of the file."""

    keys: ClassVar[tuple[str, ...]] = ("prompt_ids", "row")

    rows: tuple[Row, ...]

    @classmethod
    def from_ids(cls, prompts: Iterable[Sequence[int]], rows: Iterable[Row], *, source: str = "rows") -> PromptDataset:
        """Return a dataset of tokenized prompts, for a `DataSpec` of your own.

        Args:
            prompts: token ids of each prompt.
            rows: row of each prompt, which the reward function and `samples.jsonl` get.
            source: where the prompts come from, for messages.

        Raises:
            DataError: there is no prompt, or not one row for each.
        """
        tokens, dataset_rows = PackedTokens.pack(prompts), tuple(rows)
        if not dataset_rows or len(dataset_rows) != len(tokens):
            raise DataError(
                f"{source}: {len(tokens)} prompts and {len(dataset_rows)} rows; expected one row for each prompt."
            )
        longest = int(np.diff(tokens.starts).max())
        return cls(
            tokens,
            LoadReport(source, len(dataset_rows), len(dataset_rows), {}, 0, len(tokens.ids), longest),
            dataset_rows,
        )

    @override
    def source_rows(self) -> tuple[Row, ...]:
        return self.rows

    @override
    def _sample(self, rows: IntArray, ids: tuple[Hashable, ...]) -> SequenceSample:
        tokens_T, lengths = self.tokens.gather(rows)
        return SequenceSample(
            ids, {"prompt_ids": tokens_T}, {"prompt_ids": lengths}, {"row": tuple(self.rows[i] for i in rows.tolist())}
        )


def prompt_source(training: DataSpec) -> DataSpec:
    """Return a data node of the prompts in the format of the training data, for evaluations that sample responses.

    Demonstrations and preference pairs become `PromptData` with the same template, columns and file; all other nodes
    are returned unchanged.
    """
    if isinstance(training, WithPretraining):
        return prompt_source(training.prompts)
    if isinstance(training, DataSource) and not isinstance(training, PromptData):
        kind = ImageSource if isinstance(training, ImageSource) else DataSource
        shared = {field.name: getattr(training, field.name) for field in dataclasses.fields(kind)}
        return PromptData(**shared)
    return training

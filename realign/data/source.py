"""Base classes of dataset configs: file, template and length limit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from realign.data.dataset import DataSpec, LoadReport, PackedTokens
from realign.data.excerpt import Excerpt
from realign.data.files import Table, read_rows
from realign.data.split import Split
from realign.data.templates import Template, Writer
from realign.errors import DataError, SettingsError
from realign.settings import Count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_Text = TypeVar("_Text")


class TooLong(StrEnum):
    """What to do with a row over the length limit: drop it, truncate its prompt on the left, or raise an error."""

    drop = "drop"
    truncate_left = "truncate_left"
    error = "error"


@dataclass
class FileSource(DataSpec):
    """A file of rows, or one split of it."""

    path: str
    """Path of a .jsonl, .json or .parquet file, or of a folder written by `datasets`' `save_to_disk`."""
    limit: Count | None = None
    """Maximum number of rows to read from the start of the file; null reads all."""
    split: Split | None = None
    """One of several disjoint parts of the rows to use, such as `{part: 0, weights: [2, 4, 4]}`; null uses all."""

    def check(self, where: str) -> None:
        """Read the first row to check that the file exists and has the columns.

        Args:
            where: Key of this node, for messages.

        Raises:
            DataError: the file or a column is missing; names the key, the value and the nearest file or column.
        """
        try:
            first = read_rows(self.path, 1)
        except DataError as error:
            raise DataError(f"{where}.path: {error}") from error
        for setting in self.column_settings():
            try:
                first.column(getattr(self, setting))
            except DataError as error:
                raise DataError(f"{where}.{setting}: {error}") from error

    def column_settings(self) -> list[str]:
        """Return the names of the fields that contain the name of a required column."""
        return []

    def table(self) -> Table:
        """Return the rows of the file, after applying the limit and the split."""
        table = read_rows(self.path, self.limit)
        return table if self.split is None else self.split.apply(table)


@dataclass
class DataSource(FileSource):
    """A file of rows, and the format of a prompt (config node)."""

    prompt_column: str = "prompt"
    """Column with the prompt: a string, or with template=chat also a list of messages with role and content.
    `question.text` selects an item of a column."""
    template: Template = Template.plain
    """Prompt format: plain (text) or chat (the tokenizer's chat template)."""
    prefix: str = ""
    """Text before the prompt."""
    suffix: str = ""
    """Text after the prompt."""
    system: str = ""
    """Text of a system message before the prompt (template=chat); empty adds no message."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Additional arguments of the chat template, such as `{enable_thinking: false}`."""
    too_long: TooLong = TooLong.drop
    """Handling of a row over the length limit: drop | truncate_left | error."""
    excerpt: Excerpt | None = None
    """Excerpt of the prompt column to use, such as `{max_tokens: 64, end: "."}`. It replaces the text in the row.
    null uses the whole text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("system", "template_options"):
            if self.template is Template.plain and (value := getattr(self, name)):
                raise SettingsError(f"{name}={value!r}: requires template=chat, but template=plain. Set template=chat.")

    def column_settings(self) -> list[str]:
        """See `FileSource`."""
        return ["prompt_column"]

    def read(self, tokenizer: PreTrainedTokenizerBase) -> Table:
        """Return the rows of `table()`, after applying `excerpt`, which counts tokens of `tokenizer`."""
        table = self.table()
        return table if self.excerpt is None else self.excerpt.apply(table, self.prompt_column, tokenizer)

    def writer(self, tokenizer: PreTrainedTokenizerBase) -> Writer:
        """Return the writer of prompts for this config."""
        return Writer(tokenizer, self.template, self.prefix, self.suffix, self.system, self.template_options)


def each_row(table: Table, write: Callable[[int], _Text]) -> list[_Text]:
    """Return `write(index)` for every row, and add the file and line to its `DataError`s."""
    written = []
    for index in range(len(table)):
        try:
            written.append(write(index))
        except DataError as error:
            raise DataError(f"{table.where(index)}: {error}") from error
    return written


@dataclass
class LengthLimit:
    """Length limit that is applied row by row, with counts of dropped and truncated rows.

    Attributes:
        setting: Name of the config field, for messages.
        tokens: Maximum length of a text in tokens; None sets no limit.
        too_long: Handling of longer texts.
        start: Number of start tokens, which truncation keeps.
        dropped: Number of dropped rows.
        truncated: Number of truncated rows.
    """

    setting: str
    tokens: int | None
    too_long: TooLong
    start: int
    dropped: int = 0
    truncated: int = 0

    def fit(self, prompt: list[int], where: str, response_tokens: int = 0) -> list[int] | None:
        """Return the prompt, truncated so that it fits together with its response; None to drop the row.

        Raises:
            DataError: the text exceeds the limit, and `too_long` is error.
        """
        length = len(prompt) + response_tokens
        if self.tokens is None or length <= self.tokens:
            return prompt
        if self.too_long is TooLong.error:
            raise DataError(
                f"{where} has {length} tokens, more than {self.setting}={self.tokens}. Raise {self.setting}, or set "
                "too_long=drop or truncate_left."
            )
        keep = self.tokens - response_tokens - self.start
        if self.too_long is TooLong.drop or keep < 1:
            self.dropped += 1
            return None
        self.truncated += 1
        return prompt[: self.start] + prompt[len(prompt) - keep :]

    def report(self, table: Table, tokens: PackedTokens, dropped: Mapping[str, int] | None = None) -> LoadReport:
        """Return the report on the rows of `table`; `dropped` counts further dropped rows by reason (`load_report`)."""
        too_long = {f"longer than {self.setting}={self.tokens}": self.dropped} if self.dropped else {}
        return load_report(table, tokens, {**table.dropped, **(dropped or {}), **too_long}, self.truncated)


def load_report(table: Table, tokens: PackedTokens, dropped: dict[str, int], truncated: int = 0) -> LoadReport:
    """Return the report on the rows of `table`, and log it if any row was dropped or truncated.

    Args:
        table: The rows of the file.
        tokens: The rows of the resulting dataset.
        dropped: Number of dropped rows by reason.
        truncated: Number of rows truncated on the left.

    Raises:
        DataError: no row is left.
    """
    report = LoadReport(
        path=str(table.path),
        rows_read=len(table) + sum(table.dropped.values()),
        rows_kept=len(tokens),
        rows_dropped=dropped,
        rows_truncated=truncated,
        tokens=len(tokens.ids),
        longest=int((tokens.starts[1:] - tokens.starts[:-1]).max(initial=0)),
    )
    if not len(tokens):
        raise DataError(f"no row is left of {report}")
    if dropped or truncated:
        logger.warning("%s", report)
    return report

"""What every dataset's config has in common: the file, the template, and the limit on length."""

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

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_Text = TypeVar("_Text")


class TooLong(StrEnum):
    """What happens to a row over the length limit: leave it out, cut its prompt's beginning off, or stop."""

    drop = "drop"
    truncate_left = "truncate_left"
    error = "error"


@dataclass
class FileSource(DataSpec):
    """A file of rows, or a part of it."""

    path: str
    """A .jsonl, .json or .parquet file, or a folder written by `datasets`' `save_to_disk`."""
    limit: int | None = None
    """Read only so many rows from the file's start; null reads all."""
    split: Split | None = None
    """Take one of several disjoint parts of these rows, such as `{part: 0, weights: [2, 4, 4]}`; null takes all."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, or None for all rows, found {self.limit}")

    def check(self, where: str) -> None:
        """Look at the first row, before anything is loaded: is there such a file, and has it the columns.

        Args:
            where: key of this node, for messages.

        Raises:
            ValueError: names the key, what was found and the nearest file or column.
        """
        try:
            first = read_rows(self.path, 1)
        except ValueError as error:
            raise ValueError(f"{where}.path: {error}") from error
        for setting in self.column_settings():
            try:
                first.column(getattr(self, setting))
            except ValueError as error:
                raise ValueError(f"{where}.{setting}: {error}") from error

    def column_settings(self) -> list[str]:
        """Names of the fields that name columns which every row must have."""
        return []

    def table(self) -> Table:
        """The rows of the file that are asked for."""
        table = read_rows(self.path, self.limit)
        return table if self.split is None else self.split.apply(table)


@dataclass
class DataSource(FileSource):
    """A file of rows, and how a prompt is written from one (config node)."""

    prompt_column: str = "prompt"
    """Column with a string, or (template=chat) a string or a list of messages with role and content; `question.text` is
    a part of a column."""
    template: Template = Template.plain
    """Plain text, or the tokenizer's chat template."""
    prefix: str = ""
    """Text before the column."""
    suffix: str = ""
    """Text after the column."""
    system: str = ""
    """Text of a system message before the column (template=chat); empty for none."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template, such as `{enable_thinking: false}`."""
    too_long: TooLong = TooLong.drop
    """What to do with a row over the length limit."""
    excerpt: Excerpt | None = None
    """Take a part of the prompt column's text, such as `{max_tokens: 64, end: "."}`, which then stands in the row;
    null takes the whole."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in (("template", Template), ("too_long", TooLong)):
            found = getattr(self, name)
            if found not in list(choices):
                raise ValueError(f"{name} must be one of {[c.value for c in choices]}, found {found!r}")
            setattr(self, name, choices(found))
        for name in ("max_tokens", "max_prompt_tokens"):
            if (most := getattr(self, name, None)) is not None and most < 1:
                raise ValueError(f"{name} must be at least 1, or null for no limit, found {most}")
        if self.template is Template.plain and (self.system or self.template_options):
            raise ValueError("system and template_options belong to template=chat, but template is plain")

    def column_settings(self) -> list[str]:
        """See `FileSource`."""
        return ["prompt_column"]

    def read(self, tokenizer: PreTrainedTokenizerBase) -> Table:
        """The rows of the file that are asked for; `excerpt` counts tokens of `tokenizer`."""
        table = self.table()
        return table if self.excerpt is None else self.excerpt.apply(table, self.prompt_column, tokenizer)

    def writer(self, tokenizer: PreTrainedTokenizerBase) -> Writer:
        """What writes prompts as this config says."""
        return Writer(tokenizer, self.template, self.prefix, self.suffix, self.system, self.template_options)


def each_row(table: Table, write: Callable[[int], _Text]) -> list[_Text]:
    """`write(index)` for every row; its errors are told with the file and line."""
    written = []
    for index in range(len(table)):
        try:
            written.append(write(index))
        except ValueError as error:
            raise ValueError(f"{table.where(index)}: {error}") from error
    return written


@dataclass
class LengthLimit:
    """Applies a length limit to one row after another, and counts what it did.

    Attributes:
        setting: name of the config field, for messages.
        tokens: the most that a text may have; None for no limit.
        too_long: what to do above it.
        start: number of start tokens, which truncation keeps.
    """

    setting: str
    tokens: int | None
    too_long: TooLong
    start: int
    dropped: int = 0
    truncated: int = 0

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 1:
            raise ValueError(f"{self.setting} must be at least 1, or None for no limit, found {self.tokens}")

    def fit(self, prompt: list[int], where: str, response_tokens: int = 0) -> list[int] | None:
        """The prompt, shortened if need be so that it fits together with its response; None to drop the row."""
        length = len(prompt) + response_tokens
        if self.tokens is None or length <= self.tokens:
            return prompt
        if self.too_long is TooLong.error:
            raise ValueError(f"{where} has {length} tokens, more than {self.setting}={self.tokens} (too_long=error)")
        keep = self.tokens - response_tokens - self.start
        if self.too_long is TooLong.drop or keep < 1:
            self.dropped += 1
            return None
        self.truncated += 1
        return prompt[: self.start] + prompt[len(prompt) - keep :]

    def report(self, table: Table, tokens: PackedTokens, dropped: Mapping[str, int] | None = None) -> LoadReport:
        """What became of the rows of `table`; `dropped` counts others by reason; see `load_report`."""
        too_long = {f"longer than {self.setting}={self.tokens}": self.dropped} if self.dropped else {}
        return load_report(table, tokens, {**table.dropped, **(dropped or {}), **too_long}, self.truncated)


def load_report(table: Table, tokens: PackedTokens, dropped: dict[str, int], truncated: int = 0) -> LoadReport:
    """What became of the rows of `table`, logged if any was changed or left out.

    Args:
        table: the rows that were asked for.
        tokens: the rows of the dataset that was made of them.
        dropped: number of rows by the reason why they were left out.
        truncated: rows that lost their beginning.

    Raises:
        ValueError: no row is left.
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
        raise ValueError(f"no row is left of {report}")
    if dropped or truncated:
        logger.warning("%s", report)
    return report

"""Base classes of dataset configs: file, columns, template and length limit."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from realign.data.collect import Collected, collect_table
from realign.data.columns import Row, read_column
from realign.data.dataset import DataSpec, LoadReport
from realign.data.excerpt import Excerpt
from realign.data.files import Table, read_rows
from realign.data.rendering import AssistantMasks
from realign.data.rows import Dropped, LengthLimit, RowEncoder, RowText, TooLong
from realign.data.split import Split
from realign.data.templates import Ending, Template
from realign.data.writer import Writer
from realign.errors import DataError, SettingsError
from realign.settings import Count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Text = TypeVar("_Text")


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
        try:
            columns = self.columns(first.rows[0])
        except DataError as error:
            raise DataError(f"{where}: {first.where(0)}: {error}") from error
        for setting, column in columns.items():
            try:
                first.column(column)
            except DataError as error:
                raise DataError(f"{where}.{setting}: {error}") from error

    @abstractmethod
    def columns(self, row: Row) -> dict[str, str]:
        """Return the required columns of a row by the settings that name them. Recognizes those that are not set.

        Raises:
            DataError: several columns or none fit.
        """

    def table(self) -> Table:
        """Return the rows of the file, after applying the limit and the split."""
        table = read_rows(self.path, self.limit)
        return table if self.split is None else self.split.apply(table)


@dataclass
class DataSource(FileSource):
    """A file of rows, and the format of a prompt (config node).

    A prompt is a string, or a list of chat messages with role and content (also in the ShareGPT format, with from and
    value). `question.text` selects an item of a column.
    """

    prompt_column: str | None = None
    """Column with the prompt: a string or a list of chat messages. null recognizes it."""
    tools_column: str | None = None
    """Column with the tools of a conversation: a list of JSON schemas, or its JSON text. null uses the column `tools`
    if a row has it; "" ignores it."""
    template: Template = Template.auto
    """Prompt format: auto (chat messages use the tokenizer's chat template, and strings are plain text) | plain | chat
    (a string becomes a user message)."""
    prefix: str = ""
    """Text before a prompt that is a string."""
    suffix: str = ""
    """Text after a prompt that is a string."""
    system: str = ""
    """Text of a system message before the chat messages; empty adds no message."""
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

    @abstractmethod
    def text_of(self, row: Row, writer: Writer) -> RowText | Dropped:
        """Return a row as text, or why it is dropped.

        Raises:
            DataError: the row is invalid.
        """

    @abstractmethod
    def length_limit(self) -> LengthLimit:
        """Return the length limit of the sequences of a row."""

    def ending(self, tokenizer: PreTrainedTokenizerBase) -> Ending | None:
        """Return the ending of responses; None if the rows are prompts."""
        return None

    def masks(self) -> AssistantMasks:
        """Return how the tokens of assistant turns are found."""
        return AssistantMasks.auto

    def encoder(self, tokenizer: PreTrainedTokenizerBase) -> RowEncoder:
        """Return the conversion of rows to tokens, which does not depend on how rows are read.

        Raises:
            ConfigError: the tokenizer does not support a setting.
        """
        writer = Writer(
            tokenizer, self.template, self.prefix, self.suffix, self.system, self.template_options, self.masks()
        )

        def write(row: Row) -> RowText | Dropped:
            if self.excerpt is None:
                return self.text_of(row, writer)
            column = self.columns(row).get("prompt_column")
            if column is None:
                raise DataError("excerpt needs a prompt column with strings. Set excerpt=null, or set prompt_column.")
            cut = self.excerpt.replace(row, column, tokenizer)
            return cut if isinstance(cut, Dropped) else self.text_of(cut, writer)

        return RowEncoder(tokenizer, write, self.length_limit(), self.ending(tokenizer))

    def collect(self, tokenizer: PreTrainedTokenizerBase, *, keep_rows: bool = False) -> tuple[Collected, LoadReport]:
        """Read the file, and return its rows as tokens in packed arrays, with the report on them.

        Raises:
            DataError: a row is invalid (names its file and line), or no row is left.
            ConfigError: the tokenizer does not support a setting.
        """
        encoder = self.encoder(tokenizer)
        return collect_table(self.table(), encoder, keep_rows=keep_rows)

    def tools(self, row: Row) -> Any:
        """Return the tools of a row, or None."""
        if self.tools_column is None:
            return row.get("tools")
        return read_column(row, self.tools_column) if self.tools_column else None


def each_row(table: Table, write: Callable[[int], _Text]) -> list[_Text]:
    """Return `write(index)` for every row, and add the file and line to its `DataError`s."""
    written = []
    for index in range(len(table)):
        try:
            written.append(write(index))
        except DataError as error:
            raise DataError(f"{table.where(index)}: {error}") from error
    return written

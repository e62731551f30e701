"""Text to imitate: conversations, prompts with responses, and plain text in blocks of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from typing_extensions import override

from realign.api.lengths import Lengths
from realign.data.columns import Row, overlap, pair_or_conversation
from realign.data.data_source import FileSource, ImageSource, ResponseSource, mixture_of
from realign.data.dataset import Collected, LoadReport, PackedTokens, SequenceDataset, load_report
from realign.data.encoding import Ending, RowText
from realign.data.rendering import AssistantMasks
from realign.data.row_sources import Table
from realign.data.writer import Turns, Writer
from realign.errors import DataError, SettingsError
from realign.settings import Range
from realign.tokenization import Tokens, with_start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class SupervisedData(ResponseSource, ImageSource):
    """A file of conversations, or of prompts and responses.

    Without column settings, the columns of a row decide: `messages` (or `conversations`, `conversation`) is a whole
    conversation, and `prompt` with `completion` or `response` is a prompt with its response. Rows that fit both are an
    error. The loss includes assistant turns and the tokens that end them.

    A row has the tokens of its whole text. Only if the tokens of a prompt are others alone, as generation sees it, it
    has these, and the response is tokenized from there: no token spans both.
    """

    messages_column: str | None = None
    """Column with whole conversations (lists of chat messages). null finds it by name."""
    response_column: str | None = None
    """Column with the response: a string, or a list of chat messages by the assistant (and tools). null finds it by
    name."""
    train_on_turns: Turns = Turns.all
    """Which assistant turns to learn: all | last | each (all, each in a sequence of its own that ends with it). `each`
    also works with chat templates that shorten earlier turns, such as their reasoning."""
    assistant_masks: AssistantMasks = AssistantMasks.auto
    """How to find assistant turns: auto (token prefixes, compared with `{% generation %}` blocks if the template has
    them) | prefixes | generation_blocks."""
    train_on_prompt: bool = False
    """Learn prompt tokens, too. (The first token of a sequence is never in the loss.)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        pair = {"prompt_column": self.prompt_column, "response_column": self.response_column}
        for setting, column in pair.items():
            if self.messages_column is not None and column is not None:
                raise SettingsError(
                    f"{setting}={column!r}: conflicts with messages_column={self.messages_column!r}. Set one of them."
                )
        if message := overlap(pair):
            raise SettingsError(f"{message} For whole conversations, set only messages_column.")

    @override
    def columns(self, row: Row) -> dict[str, str]:
        if self.messages_column is not None:
            return {"messages_column": self.messages_column}
        if columns := pair_or_conversation(row, self.prompt_column, self.response_column):
            return columns
        plain = " For plain texts, set data._target_=realign.data.TextData." if isinstance(row.get("text"), str) else ""
        raise DataError(
            f"the columns {sorted(row)} fit neither 'messages' nor 'prompt' with 'completion' or 'response'. Set "
            f"messages_column, or prompt_column and response_column.{plain}"
        )

    @override
    def text_of(self, row: Row, writer: Writer) -> RowText:
        values, context = self.values(row), self.context(row)
        if "messages_column" in values:
            return RowText(row, writer.conversation(values["messages_column"], context, self.train_on_turns))
        prompt, response = values["prompt_column"], values["response_column"]
        return RowText(row, writer.response(prompt, response, context, self.train_on_turns))

    @override
    def writer(self, tokenizer: PreTrainedTokenizerBase) -> Writer:
        return replace(super().writer(tokenizer), masks=self.assistant_masks)

    @override
    def pack(self, collected: Collected, report: LoadReport) -> SupervisedDataset:
        return SupervisedDataset.of(collected, report, train_on_prompt=self.train_on_prompt)


@dataclass(frozen=True, eq=False)
class SupervisedDataset(SequenceDataset):
    """Prompts with responses in memory: keys `input_ids`, `prompt_mask` and `loss_mask`.

    `prompt_mask` marks all tokens that are given: the prompt, and in conversations also the turns between trained
    turns.
    """

    keys: ClassVar[tuple[str, ...]] = ("input_ids", "prompt_mask", "loss_mask")


class Blocks(StrEnum):
    """How texts are split into blocks of tokens."""

    joined = "joined"
    """Concatenate all texts and split every `block_tokens` tokens; the incomplete last block is dropped."""
    apart = "apart"
    """Split each text separately every `block_tokens` tokens; its last block may be shorter."""


@dataclass
class TextData(FileSource):
    """A file of texts.

    Each text begins with the tokenizer's start tokens and, with `append_eos`, ends with EOS. A block is a row of the
    dataset. The loss includes all its tokens except the first. In joined blocks, tokens also attend to the previous
    text of the block, as in the pretraining of GPT-2 and in DeepSpeed-Chat.
    """

    text_column: str = "text"
    """Column with the text, a string."""
    block_tokens: Annotated[int, Range(ge=2)] = 1024
    """Length of a block in tokens. DeepSpeed-Chat uses the maximum prompt length plus the maximum answer length."""
    blocks: Blocks = Blocks.joined
    """How texts are split into blocks: joined (concatenated) | apart (each text separately)."""
    append_eos: bool = True
    """Append the tokenizer's EOS token to each text that does not already end with it."""

    @override
    def columns(self, row: Row) -> dict[str, str]:
        return {"text_column": self.text_column}

    @override
    def load(self, tokenizer: PreTrainedTokenizerBase) -> SupervisedDataset:
        """Read the file and tokenize it.

        Raises:
            DataError: a row is invalid (names its file and line), or the texts are too short for any block.
            ConfigError: the tokenizer does not support a setting.
        """
        end, writer = Ending(tokenizer, self.append_eos), Tokens(tokenizer)
        start = writer.start()
        tables = self.tables()
        shortest = self.block_tokens if self.blocks is Blocks.joined else 2
        sizes = [0] * len(tables)
        left_over = 0

        def blocks() -> Iterator[list[int]]:
            nonlocal left_over
            # Each table by itself: no block spans two sources, since a mixture needs the source of each row.
            for source, table in enumerate(tables):
                texts = _texts(table, self.text_column)
                ids = (end(with_start(text, start)) for text in writer.encode(texts))
                for block in cut(ids, self.block_tokens, self.blocks):
                    if len(block) >= shortest:
                        sizes[source] += 1
                        yield block
                    else:
                        left_over += 1

        tokens = PackedTokens.pack(blocks())
        dropped = {f"blocks shorter than {shortest} tokens": left_over} if left_over else {}
        report = load_report(tables, tokens, dropped)
        lengths = Lengths(np.ones(len(tokens), dtype=np.int64), np.diff(tokens.starts))
        trained = np.ones(len(tokens.ids), dtype=np.bool_)
        return SupervisedDataset(tokens, report, lengths, trained, mixture=mixture_of(self.sources, sizes))


def cut(texts: Iterable[list[int]], size: int, blocks: Blocks) -> Iterator[list[int]]:
    """Yield blocks of `size` tokens, and the shorter remainder after the last text (joined) or each text (apart)."""
    rest: list[int] = []
    for ids in texts:
        rest = rest + ids
        full = len(rest) - len(rest) % size
        yield from (rest[begin : begin + size] for begin in range(0, full, size))
        rest = rest[full:]
        if blocks is Blocks.apart and rest:
            yield rest
            rest = []
    if rest:
        yield rest


def _texts(table: Table, column: str) -> list[str]:
    values = table.column(column)
    for index, value in enumerate(values):
        if not isinstance(value, str):
            raise DataError(f"{table.where(index)}: the text is a {type(value).__name__}; expected a string.")
    return values

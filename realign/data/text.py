"""Plain text for language modeling, in blocks of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from realign.api.lengths import Lengths
from realign.data.collect import load_report
from realign.data.columns import Row
from realign.data.dataset import PackedTokens
from realign.data.source import FileSource, each_row, mixture_of
from realign.data.supervised import SupervisedDataset
from realign.data.templates import Ending, encode, start_tokens
from realign.errors import DataError
from realign.settings import Range

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Blocks(StrEnum):
    """How texts are split into blocks of tokens."""

    joined = "joined"
    """Concatenate all texts and split every `block_tokens` tokens; the incomplete last block is dropped."""
    apart = "apart"
    """Split each text separately every `block_tokens` tokens; its last block may be shorter."""


@dataclass
class TextData(FileSource):
    """A file of texts (config node).

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

    def columns(self, row: Row) -> dict[str, str]:
        """See `FileSource`."""
        return {"text_column": self.text_column}

    def load(self, tokenizer: PreTrainedTokenizerBase) -> SupervisedDataset:
        """Read the file and tokenize it.

        Raises:
            DataError: a row is invalid (names its file and line), or the texts are too short for any block.
            ConfigError: the tokenizer does not support a setting.
        """
        end, start = Ending(tokenizer, self.append_eos), start_tokens(tokenizer)
        tables = self.tables()
        shortest = self.block_tokens if self.blocks is Blocks.joined else 2
        sizes = [0] * len(tables)
        left_over = 0

        def kept() -> Iterator[list[int]]:
            nonlocal left_over
            for source, table in enumerate(tables):
                values = table.column(self.text_column)
                texts = each_row(table, lambda i, values=values: _text(values[i]))  # type: ignore[misc]
                for block in cut(map(end, encode(tokenizer, texts, start)), self.block_tokens, self.blocks):
                    if len(block) >= shortest:
                        sizes[source] += 1
                        yield block
                    else:
                        left_over += 1

        tokens = PackedTokens.pack(kept())
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
        whole = len(rest) - len(rest) % size
        yield from (rest[begin : begin + size] for begin in range(0, whole, size))
        rest = rest[whole:]
        if blocks is Blocks.apart and rest:
            yield rest
            rest = []
    if rest:
        yield rest


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise DataError(f"the text is a {type(value).__name__}; expected a string.")
    return value

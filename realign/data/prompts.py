"""Prompt data for generation."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from realign.api.lengths import IntArray
from realign.api.sample import SequenceSample
from realign.data.dataset import PackedDataset, PackedTokens
from realign.data.files import Row
from realign.data.source import DataSource, LengthLimit, each_row
from realign.data.templates import encode
from realign.errors import DataError
from realign.settings import Count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class PromptData(DataSource):
    """A file of prompts (config node). Samples also contain the whole row, for the reward function."""

    max_prompt_tokens: Count | None = None
    """Maximum length of a prompt in tokens, including start tokens; null sets no limit."""

    def load(self, tokenizer: PreTrainedTokenizerBase) -> PromptDataset:
        """Read the file and tokenize its prompts.

        Raises:
            DataError: a row is invalid (names its file and line), or no row is left.
            ConfigError: the tokenizer does not support a setting.
        """
        writer = self.writer(tokenizer)
        start = writer.start()
        limit = LengthLimit("max_prompt_tokens", self.max_prompt_tokens, self.too_long, len(start))
        table = self.read(tokenizer)
        values = table.column(self.prompt_column)
        texts = each_row(table, lambda i: writer.prompt(values[i]))
        rows: list[Row] = []

        def kept() -> Iterator[list[int]]:
            for index, ids in enumerate(encode(tokenizer, texts, start)):
                if not ids:
                    raise DataError(f"{table.where(index)}: the prompt has no tokens.")
                fitting = limit.fit(ids, table.where(index))
                if fitting is not None:
                    rows.append(table.rows[index])
                    yield fitting

        tokens = PackedTokens.pack(kept())
        return PromptDataset(tokens, limit.report(table, tokens), tuple(rows))


@dataclass(frozen=True, eq=False)
class PromptDataset(PackedDataset):
    """Prompts in memory: key `prompt_ids`, and metadata `row`, the row of the file."""

    keys: ClassVar[tuple[str, ...]] = ("prompt_ids", "row")

    rows: tuple[Row, ...]

    def _sample(self, rows: IntArray, ids: tuple[Hashable, ...]) -> SequenceSample:
        tokens_T, lengths = self.tokens.gather(rows)
        return SequenceSample(
            ids, {"prompt_ids": tokens_T}, {"prompt_ids": lengths}, {"row": tuple(self.rows[i] for i in rows.tolist())}
        )

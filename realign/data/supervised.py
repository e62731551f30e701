"""Supervised data: prompts with target responses."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from realign.api.lengths import IntArray
from realign.api.sample import SequenceSample
from realign.data.dataset import PackedDataset, PackedTokens
from realign.data.source import DataSource, LengthLimit, each_row
from realign.data.templates import Ending, encode
from realign.errors import DataError
from realign.settings import Count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class SupervisedData(DataSource):
    """A file of prompts and responses (config node).

    Prompt and response are tokenized separately and concatenated as ids, as in generation. No token spans both.
    """

    response_column: str = "response"
    """Column with the response, a string."""
    max_tokens: Count | None = None
    """Maximum length of prompt plus response in tokens; null sets no limit. Responses are never truncated. A row is
    dropped if its response leaves no room for a prompt token."""
    append_eos: bool = True
    """Append the tokenizer's EOS token to each response that does not already end with it."""
    train_on_prompt: bool = False
    """Whether the loss includes prompt tokens. It never includes the first token of a sequence."""

    def column_settings(self) -> list[str]:
        """See `FileSource`."""
        return [*super().column_settings(), "response_column"]

    def load(self, tokenizer: PreTrainedTokenizerBase) -> SupervisedDataset:
        """Read the file and tokenize it.

        Raises:
            DataError: a row is invalid (names its file and line), or no row is left.
            ConfigError: the tokenizer does not support a setting.
        """
        end = Ending(tokenizer, self.append_eos)
        writer = self.writer(tokenizer)
        start = writer.start()
        limit = LengthLimit("max_tokens", self.max_tokens, self.too_long, len(start))
        table = self.read(tokenizer)
        prompts, responses = table.column(self.prompt_column), table.column(self.response_column)
        pairs = each_row(table, lambda i: writer.pair(prompts[i], responses[i]))
        prompt_lengths = array("q")

        def kept() -> Iterator[list[int]]:
            encoded = zip(
                encode(tokenizer, [prompt for prompt, _ in pairs], start),
                encode(tokenizer, [response for _, response in pairs]),
                strict=True,
            )
            for index, (prompt, unended) in enumerate(encoded):
                response = end(unended)
                if len(prompt) + len(response) < 2 or not response:
                    raise DataError(f"{table.where(index)}: the response has no token to train on.")
                fitting = limit.fit(prompt, table.where(index), len(response))
                if fitting is not None:
                    prompt_lengths.append(len(fitting))
                    yield fitting + response

        tokens = PackedTokens.pack(kept())
        report = limit.report(table, tokens)
        return SupervisedDataset(tokens, report, np.array(prompt_lengths, dtype=np.int64), self.train_on_prompt)


@dataclass(frozen=True, eq=False)
class SupervisedDataset(PackedDataset):
    """Prompts with responses in memory: keys `input_ids`, `prompt_mask` and `loss_mask`."""

    keys: ClassVar[tuple[str, ...]] = ("input_ids", "prompt_mask", "loss_mask")

    prompt_lengths: IntArray
    train_on_prompt: bool

    def _sample(self, rows: IntArray, ids: tuple[Hashable, ...]) -> SequenceSample:
        tokens_T, lengths = self.tokens.gather(rows)
        position_T = np.arange(lengths.total) - np.repeat(lengths.starts[:-1], lengths.flat)
        prompt_T = torch.from_numpy(position_T < np.repeat(self.prompt_lengths[rows], lengths.flat))
        trains_T = torch.ones_like(prompt_T) if self.train_on_prompt else ~prompt_T
        data = {
            "input_ids": tokens_T,
            "prompt_mask": prompt_T,
            "loss_mask": trains_T & torch.from_numpy(position_T > 0),
        }
        return SequenceSample(ids, data, dict.fromkeys(data, lengths))

"""Prompts with given responses, for distillation that mixes sampled and given sequences (GKD, arXiv:2306.13649)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from realign.api.lengths import IntArray, Lengths
from realign.api.sample import SequenceSample
from realign.data.dataset import Dataset, DataSpec, SequenceDataset
from realign.data.order import RowOrder
from realign.errors import DataError, SettingsError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GIVEN = ("input_ids", "prompt_mask", "loss_mask")


@dataclass
class PromptsWithResponses(DataSpec):
    """Supervised data as prompts with given responses (config node).

    Samples have the keys `prompt_ids`, the tokens before the first token of the response, and `data_input_ids`,
    `data_prompt_mask` and `data_loss_mask`, the sequence with the given response.
    """

    responses: DataSpec
    """Data node of the prompts and responses, such as `realign.data.SupervisedData`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.responses.streams:
            raise SettingsError("responses.streaming=true: prompts with responses must be in memory. Set false.")
        if self.responses.has_images:
            raise SettingsError("responses.images_column: prompts with given responses have no images. Remove it.")

    def describe_source(self) -> str:
        """See `DataSpec`."""
        return self.responses.describe_source()

    def check(self, where: str) -> None:
        """Check the data node of the responses; see `DataSpec.check`."""
        self.responses.check(f"{where}.responses")

    def load(self, tokenizer: PreTrainedTokenizerBase) -> PromptsWithResponsesDataset:
        """Load the responses.

        Raises:
            DataError: the dataset cannot be loaded, has no responses, or a row has no prompt or several sequences.
            ConfigError: the tokenizer does not support a setting.
        """
        found = self.responses.load(tokenizer)
        if not isinstance(found, SequenceDataset) or set(found.keys) != set(GIVEN):
            raise DataError(
                f"responses: the dataset has keys {sorted(found.keys)}, expected {sorted(GIVEN)}. Use "
                "realign.data.SupervisedData."
            )
        if (found.lengths.counts != 1).any():
            row = int(np.flatnonzero(found.lengths.counts != 1)[0])
            raise DataError(
                f"responses: row {row} has {found.lengths.counts[row]} sequences. A prompt has one given response. Set "
                "responses.train_on_turns=all or last."
            )
        dataset = PromptsWithResponsesDataset(found)
        if not dataset.prompt_lengths.all():
            row = int(np.flatnonzero(dataset.prompt_lengths == 0)[0])
            raise DataError(f"responses: row {row} has no token before its response. Remove it, or add a prompt.")
        return dataset


@dataclass(frozen=True, eq=False)
class PromptsWithResponsesDataset(Dataset):
    """Prompts in memory, with given responses in keys `data_input_ids`, `data_prompt_mask` and `data_loss_mask`.

    Attributes:
        responses: Dataset of the sequences, one for each row.
    """

    responses: SequenceDataset

    def __len__(self) -> int:
        return len(self.responses)

    def order(self, seed: int, shuffle: bool) -> RowOrder:
        """See `Dataset`."""
        return self.responses.order(seed, shuffle)

    def describe(self) -> str:
        """See `Dataset`."""
        return f"{self.responses.describe()} of prompts with responses"

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that every sample has."""
        return ("prompt_ids", *(f"data_{key}" for key in GIVEN))

    @cached_property
    def prompt_lengths(self) -> IntArray:
        """Number of tokens of each row before the first token of its response."""
        starts, trained = self.responses.tokens.starts, np.flatnonzero(self.responses.trained)
        ends = np.append(trained, len(self.responses.trained))
        first: IntArray = ends[np.searchsorted(trained, starts[:-1])]
        return np.minimum(first, starts[1:]) - starts[:-1]

    @property
    def longest_sequence(self) -> int:
        """Length of the longest prompt; see `Dataset`."""
        return int(self.prompt_lengths.max(initial=0))

    @property
    def longest_text(self) -> int:
        """Length of the longest prompt with its given response; see `Dataset`."""
        return self.responses.longest_sequence

    def sample(self, rows: Sequence[tuple[int, int]]) -> SequenceSample:
        """Return the prompts and given sequences at the given (epoch, row) pairs."""
        given = self.responses.sample(rows).rename({key: f"data_{key}" for key in GIVEN})
        sizes = self.prompt_lengths[[row for _, row in rows]] if rows else self.prompt_lengths[:0]
        starts = given.lengths["data_input_ids"].starts[:-1]
        inside = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        prompts_T = given["data_input_ids"][np.repeat(starts, sizes) + inside]
        return given.with_data({"prompt_ids": prompts_T}, lengths=Lengths(np.ones_like(sizes), sizes))


__all__ = ["PromptsWithResponses", "PromptsWithResponsesDataset"]

"""Prompts combined with other data.

`WithPretraining` adds pretraining texts, for PPO-ptx (InstructGPT, arXiv:2203.02155), whose loss has a
language-modeling term. `PromptsWithResponses` adds given responses, for distillation that mixes sampled and given
sequences (GKD, arXiv:2306.13649).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from realign.api.lengths import IntArray, Lengths
from realign.api.sample import SequenceSample
from realign.api.seeds import derive_seed
from realign.data.columns import Row
from realign.data.dataset import Dataset, DataSpec, SequenceDataset
from realign.data.order import RowOrder, epoch_order
from realign.errors import DataError, SettingsError
from realign.settings import Count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEXTS = ("input_ids", "loss_mask")


@dataclass
class WithPretraining(DataSpec):
    """Prompts, each with rows of pretraining text, for PPO-ptx.

    Samples have the keys of the prompts, `ptx_input_ids` and `ptx_loss_mask`. The text rows of a prompt are a pure
    function of `seed`, its row and its epoch. An epoch of n prompts uses the next `n * sequences_per_prompt` rows of
    the stream of texts. This stream has separate epochs, so both datasets are used evenly whatever their sizes.
    (DeepSpeed-Chat zips both and ends an epoch with the shorter one.)
    """

    prompts: DataSpec
    """Where the prompts come from, such as `realign.data.PromptData`."""
    pretraining: DataSpec
    """Where the pretraining text comes from: `realign.data.TextData` or `realign.data.SupervisedData`."""
    sequences_per_prompt: Count = 1
    """Rows of pretraining text per prompt."""
    seed: int = 0
    """Seed that shuffles the texts; `${seed}` uses the seed of the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prompts", "pretraining"):
            if getattr(self, name).streams:
                raise SettingsError(
                    f"{name}.streaming=true: a combination of two datasets needs both in memory. Set false."
                )
            if getattr(self, name).has_images:
                raise SettingsError(f"{name}.images_column: a combination with pretraining text has no images.")

    @override
    def describe_source(self) -> str:
        sources = {"prompts": self.prompts.describe_source(), "pretraining": self.pretraining.describe_source()}
        return "; ".join(f"{name}: {text}" for name, text in sources.items() if text)

    @override
    def check(self, where: str) -> None:
        """Check both data nodes; see `DataSpec.check`."""
        self.prompts.check(f"{where}.prompts")
        self.pretraining.check(f"{where}.pretraining")

    @override
    def load(self, tokenizer: PreTrainedTokenizerBase) -> PromptsWithPretraining:
        """Load both datasets.

        Raises:
            DataError: a dataset cannot be loaded, or the pretraining dataset is empty or lacks a key.
            ConfigError: the tokenizer does not support a setting.
        """
        prompts, texts = self.prompts.load(tokenizer), self.pretraining.load(tokenizer)
        if not len(texts):
            raise DataError("pretraining: the dataset contains no rows.")
        if missing := sorted(set(_TEXTS) - set(texts.keys)):
            raise DataError(
                f"pretraining: the dataset has keys {sorted(texts.keys)}, but not {missing[0]!r}. Use "
                "realign.data.TextData or realign.data.SupervisedData."
            )
        return PromptsWithPretraining(prompts, texts, self.sequences_per_prompt, self.seed)


@dataclass(frozen=True, eq=False)
class PromptsWithPretraining(Dataset):
    """Prompts in memory, with pretraining texts in keys `ptx_input_ids` and `ptx_loss_mask`.

    Attributes:
        prompts: Dataset of the prompts.
        texts: Dataset of the pretraining texts.
        per_prompt: Number of rows of `texts` per prompt.
        seed: Seed of the order of the texts.
    """

    prompts: Dataset
    texts: Dataset
    per_prompt: int
    seed: int

    def __len__(self) -> int:
        return len(self.prompts)

    @override
    def order(self, seed: int, shuffle: bool) -> RowOrder:
        """Return the training order of the prompts."""
        return self.prompts.order(seed, shuffle)

    @override
    def source_rows(self) -> Sequence[Row]:
        return self.prompts.source_rows()

    @override
    def describe(self) -> str:
        return f"{self.prompts.describe()}, and {self.texts.describe()} of pretraining text"

    @property
    @override
    def keys(self) -> tuple[str, ...]:
        """Keys that every sample has."""
        return (*self.prompts.keys, *(f"ptx_{key}" for key in _TEXTS))

    @property
    @override
    def longest_sequence(self) -> int:
        """Length of the longest prompt sequence; see `Dataset`."""
        return self.prompts.longest_sequence

    @property
    @override
    def longest_row(self) -> int:
        """Length of the longest prompt sequence; see `Dataset`."""
        return self.prompts.longest_row

    @property
    @override
    def longest_text(self) -> int:
        """Length of the longest pretraining text; see `Dataset`."""
        return self.texts.longest_row

    @override
    def sample(self, rows: Sequence[tuple[int, int]]) -> SequenceSample:
        """Return the prompts at the given (epoch, row) pairs, with their texts."""
        texts = self.texts.sample(self.texts_of(rows))
        counts = texts.lengths[_TEXTS[0]].counts.reshape(len(rows), self.per_prompt).sum(1)
        lengths = Lengths(counts, texts.lengths[_TEXTS[0]].flat)
        return self.prompts.sample(rows).with_data({f"ptx_{key}": texts[key] for key in _TEXTS}, lengths=lengths)

    def texts_of(self, rows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the (epoch, row) of the texts of each prompt; the texts of one prompt are consecutive."""
        first = np.array([epoch * len(self.prompts) + row for epoch, row in rows], dtype=np.int64) * self.per_prompt
        places = (first[:, None] + np.arange(self.per_prompt)).ravel()
        epochs, inside = np.divmod(places, len(self.texts))
        seed = derive_seed(self.seed, "pretraining")
        orders = {epoch: epoch_order(len(self.texts), seed, epoch) for epoch in np.unique(epochs).tolist()}
        pairs = zip(epochs.tolist(), inside.tolist(), strict=True)
        return [(epoch, int(orders[epoch][place])) for epoch, place in pairs]


_GIVEN = ("input_ids", "prompt_mask", "loss_mask")


@dataclass
class PromptsWithResponses(DataSpec):
    """Supervised data as prompts that come with a response, for distillation that mixes given and sampled responses.

    Samples have the keys `prompt_ids`, the tokens before the first token of the response, and `data_input_ids`,
    `data_prompt_mask` and `data_loss_mask`, the sequence with the given response.
    """

    responses: DataSpec
    """Where prompts and responses come from, such as `realign.data.SupervisedData`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.responses.streams:
            raise SettingsError("responses.streaming=true: prompts with responses must be in memory. Set false.")
        if self.responses.has_images:
            raise SettingsError("responses.images_column: prompts with given responses have no images. Remove it.")

    @override
    def describe_source(self) -> str:
        return self.responses.describe_source()

    @override
    def check(self, where: str) -> None:
        """Check the data node of the responses; see `DataSpec.check`."""
        self.responses.check(f"{where}.responses")

    @override
    def load(self, tokenizer: PreTrainedTokenizerBase) -> PromptsWithResponsesDataset:
        """Load the responses.

        Raises:
            DataError: the dataset cannot be loaded, has no responses, or a row has no prompt or several sequences.
            ConfigError: the tokenizer does not support a setting.
        """
        loaded = self.responses.load(tokenizer)
        if not isinstance(loaded, SequenceDataset) or set(loaded.keys) != set(_GIVEN):
            raise DataError(
                f"responses: the dataset has keys {sorted(loaded.keys)}, expected {sorted(_GIVEN)}. Use "
                "realign.data.SupervisedData."
            )
        if (loaded.lengths.counts != 1).any():
            row = int(np.flatnonzero(loaded.lengths.counts != 1)[0])
            raise DataError(
                f"responses: row {row} has {loaded.lengths.counts[row]} sequences. A prompt has one given response. "
                "Set responses.train_on_turns=all or last."
            )
        dataset = PromptsWithResponsesDataset(loaded)
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

    @override
    def order(self, seed: int, shuffle: bool) -> RowOrder:
        return self.responses.order(seed, shuffle)

    @override
    def describe(self) -> str:
        return f"{self.responses.describe()} of prompts with responses"

    @property
    @override
    def keys(self) -> tuple[str, ...]:
        """Keys that every sample has."""
        return ("prompt_ids", *(f"data_{key}" for key in _GIVEN))

    @cached_property
    def prompt_lengths(self) -> IntArray:
        """Number of tokens of each row before the first token of its response."""
        starts, trained = self.responses.tokens.starts, np.flatnonzero(self.responses.trained)
        # The end of all tokens stands for "no trained token follows". The minimum below replaces it, and a
        # trained token of a later row, by the end of the row itself.
        ends = np.append(trained, len(self.responses.trained))
        first: IntArray = ends[np.searchsorted(trained, starts[:-1])]
        return np.minimum(first, starts[1:]) - starts[:-1]

    @property
    @override
    def longest_sequence(self) -> int:
        """Length of the longest prompt; see `Dataset`."""
        return int(self.prompt_lengths.max(initial=0))

    @property
    @override
    def longest_text(self) -> int:
        """Length of the longest prompt with its given response; see `Dataset`."""
        return self.responses.longest_sequence

    @override
    def sample(self, rows: Sequence[tuple[int, int]]) -> SequenceSample:
        """Return the prompts and given sequences at the given (epoch, row) pairs."""
        given = self.responses.sample(rows).rename({key: f"data_{key}" for key in _GIVEN})
        sizes = self.prompt_lengths[[row for _, row in rows]] if rows else self.prompt_lengths[:0]
        starts = given.lengths["data_input_ids"].starts[:-1]
        # Index of each prompt token within its prompt: 0, 1, ... for each row.
        inside = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        prompts_T = given["data_input_ids"][np.repeat(starts, sizes) + inside]
        return given.with_data({"prompt_ids": prompts_T}, lengths=Lengths(np.ones_like(sizes), sizes))

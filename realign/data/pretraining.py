"""Prompts combined with pretraining texts: the data of PPO-ptx (InstructGPT, arXiv:2203.02155).

PPO-ptx adds a language-modeling loss on pretraining texts to the reinforcement-learning loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from realign.api.lengths import Lengths
from realign.api.sample import SequenceSample
from realign.api.seeds import derive_seed
from realign.data.dataset import Dataset, DataSpec
from realign.data.order import RowOrder, epoch_order
from realign.errors import DataError, SettingsError
from realign.settings import Count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXTS = ("input_ids", "loss_mask")


@dataclass
class WithPretraining(DataSpec):
    """Combination of two data nodes (config node): every prompt comes with rows of pretraining text.

    Samples have the keys of the prompts, `ptx_input_ids` and `ptx_loss_mask`. The text rows of a prompt are a pure
    function of `seed`, its row and its epoch. An epoch of n prompts uses the next `n * sequences_per_prompt` rows of
    the stream of texts. This stream has separate epochs, so both datasets are used evenly whatever their sizes.
    (DeepSpeed-Chat zips both and ends an epoch with the shorter one.)
    """

    prompts: DataSpec
    """Data node of the prompts, such as `realign.data.PromptData`."""
    pretraining: DataSpec
    """Data node with keys `input_ids` and `loss_mask`: `realign.data.TextData` or `realign.data.SupervisedData`."""
    sequences_per_prompt: Count = 1
    """Number of `pretraining` rows per prompt."""
    seed: int = 0
    """Seed of the order of the texts; `${seed}` uses the seed of the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prompts", "pretraining"):
            if getattr(self, name).streams:
                raise SettingsError(
                    f"{name}.streaming=true: a combination of two datasets needs both in memory. Set false."
                )
            if getattr(self, name).has_images:
                raise SettingsError(f"{name}.images_column: a combination with pretraining text has no images.")

    def describe_source(self) -> str:
        """See `DataSpec`."""
        found = {"prompts": self.prompts.describe_source(), "pretraining": self.pretraining.describe_source()}
        return "; ".join(f"{name}: {text}" for name, text in found.items() if text)

    def check(self, where: str) -> None:
        """Check both data nodes; see `DataSpec.check`."""
        self.prompts.check(f"{where}.prompts")
        self.pretraining.check(f"{where}.pretraining")

    def load(self, tokenizer: PreTrainedTokenizerBase) -> PromptsWithPretraining:
        """Load both datasets.

        Raises:
            DataError: a dataset cannot be loaded, or the pretraining dataset is empty or lacks a key.
            ConfigError: the tokenizer does not support a setting.
        """
        prompts, texts = self.prompts.load(tokenizer), self.pretraining.load(tokenizer)
        if not len(texts):
            raise DataError("pretraining: the dataset contains no rows.")
        if missing := sorted(set(TEXTS) - set(texts.keys)):
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

    def order(self, seed: int, shuffle: bool) -> RowOrder:
        """Return the training order of the prompts."""
        return self.prompts.order(seed, shuffle)

    def describe(self) -> str:
        """See `Dataset`."""
        return f"{self.prompts.describe()}, and {self.texts.describe()} of pretraining text"

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that every sample has."""
        return (*self.prompts.keys, *(f"ptx_{key}" for key in TEXTS))

    @property
    def longest_sequence(self) -> int:
        """Length of the longest prompt sequence; see `Dataset`."""
        return self.prompts.longest_sequence

    @property
    def longest_row(self) -> int:
        """Length of the longest prompt sequence; see `Dataset`."""
        return self.prompts.longest_row

    @property
    def longest_text(self) -> int:
        """Length of the longest pretraining text; see `Dataset`."""
        return self.texts.longest_row

    def sample(self, rows: Sequence[tuple[int, int]]) -> SequenceSample:
        """Return the prompts at the given (epoch, row) pairs, with their texts."""
        texts = self.texts.sample(self.texts_of(rows))
        counts = texts.lengths[TEXTS[0]].counts.reshape(len(rows), self.per_prompt).sum(1)
        lengths = Lengths(counts, texts.lengths[TEXTS[0]].flat)
        return self.prompts.sample(rows).with_data({f"ptx_{key}": texts[key] for key in TEXTS}, lengths=lengths)

    def texts_of(self, rows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the (epoch, row) of the texts of each prompt; the texts of one prompt are consecutive."""
        first = np.array([epoch * len(self.prompts) + row for epoch, row in rows], dtype=np.int64) * self.per_prompt
        places = (first[:, None] + np.arange(self.per_prompt)).ravel()
        epochs, inside = np.divmod(places, len(self.texts))
        seed = derive_seed(self.seed, "pretraining")
        orders = {epoch: epoch_order(len(self.texts), seed, epoch) for epoch in np.unique(epochs).tolist()}
        pairs = zip(epochs.tolist(), inside.tolist(), strict=True)
        return [(epoch, int(orders[epoch][place])) for epoch, place in pairs]

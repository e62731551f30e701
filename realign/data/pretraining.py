"""Prompts that bring texts along: the data of PPO-ptx (InstructGPT, arXiv:2203.02155).

There the policy goes on learning the texts that it was trained on before, while it learns from rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from realign.api.lengths import Lengths
from realign.api.model import derive_seed
from realign.api.sample import SequenceSample
from realign.data.dataset import Dataset, DataSpec
from realign.data.order import epoch_order

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXTS = ("input_ids", "loss_mask")


@dataclass
class WithPretraining(DataSpec):
    """Two data nodes as one (config node): every prompt comes with rows of the second.

    The keys of the prompts are joined by `ptx_input_ids` and `ptx_loss_mask`. Which rows a prompt brings is a pure
    function of `seed`, its row and its epoch: an epoch of n prompts takes the next `n * sequences_per_prompt` rows of
    the stream of texts, which has epochs of its own, so that both datasets are used evenly whatever their sizes.
    (DeepSpeed-Chat zips both and stops an epoch at the end of the shorter one.)
    """

    prompts: DataSpec
    """The prompts, such as `realign.data.PromptData`."""
    pretraining: DataSpec
    """What has keys `input_ids` and `loss_mask`: `realign.data.TextData` or `realign.data.SupervisedData`."""
    sequences_per_prompt: int = 1
    """Rows of `pretraining` that come with each prompt."""
    seed: int = 0
    """Of the order of the texts; `${seed}` takes the run's."""

    def __post_init__(self) -> None:
        if self.sequences_per_prompt < 1:
            raise ValueError(f"sequences_per_prompt must be at least 1, found {self.sequences_per_prompt}")

    def check(self, where: str) -> None:
        """See `DataSpec.check`; checks both."""
        self.prompts.check(f"{where}.prompts")
        self.pretraining.check(f"{where}.pretraining")

    def load(self, tokenizer: PreTrainedTokenizerBase) -> PromptsWithPretraining:
        """Load both.

        Raises:
            ValueError: as the nodes do; or the second dataset holds no row or lacks a key, or the first has its keys.
        """
        prompts, texts = self.prompts.load(tokenizer), self.pretraining.load(tokenizer)
        if not len(texts):
            raise ValueError("pretraining: the dataset holds no row")
        if missing := sorted(set(TEXTS) - set(texts.keys)):
            raise ValueError(f"pretraining: the dataset has no key {missing[0]!r}, only {sorted(texts.keys)}")
        return PromptsWithPretraining(prompts, texts, self.sequences_per_prompt, self.seed)


@dataclass(frozen=True, eq=False)
class PromptsWithPretraining(Dataset):
    """Prompts in memory, with texts in keys `ptx_input_ids` and `ptx_loss_mask`.

    Attributes:
        prompts: the prompts.
        texts: what comes along.
        per_prompt: rows of `texts` for each prompt.
        seed: of their order.
    """

    prompts: Dataset
    texts: Dataset
    per_prompt: int
    seed: int

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that every sample has."""
        return (*self.prompts.keys, *(f"ptx_{key}" for key in TEXTS))

    @property
    def longest_sequence(self) -> int:
        """See `Dataset`; of the prompts."""
        return self.prompts.longest_sequence

    @property
    def longest_row(self) -> int:
        """See `Dataset`; of the prompts."""
        return self.prompts.longest_row

    @property
    def longest_text(self) -> int:
        """See `Dataset`; of the pretraining text."""
        return self.texts.longest_row

    def sample(self, rows: Sequence[tuple[int, int]]) -> SequenceSample:
        """The prompts at these places, given as (epoch, row), with their texts."""
        texts = self.texts.sample(self.texts_of(rows))
        counts = texts.lengths[TEXTS[0]].counts.reshape(len(rows), self.per_prompt).sum(1)
        lengths = Lengths(counts, texts.lengths[TEXTS[0]].flat)
        return self.prompts.sample(rows).with_data({f"ptx_{key}": texts[key] for key in TEXTS}, lengths=lengths)

    def texts_of(self, rows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The (epoch, row) of the texts of each prompt, `per_prompt` of them for one after the other."""
        first = np.array([epoch * len(self.prompts) + row for epoch, row in rows], dtype=np.int64) * self.per_prompt
        places = (first[:, None] + np.arange(self.per_prompt)).ravel()
        epochs, inside = np.divmod(places, len(self.texts))
        seed = derive_seed(self.seed, "pretraining")
        orders = {epoch: epoch_order(len(self.texts), seed, epoch) for epoch in np.unique(epochs).tolist()}
        pairs = zip(epochs.tolist(), inside.tolist(), strict=True)
        return [(epoch, int(orders[epoch][place])) for epoch, place in pairs]

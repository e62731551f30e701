"""`RewardCalibration`: gives the rewards of a policy's responses a known mean and deviation, before or after training.

Source: arXiv:1909.08593, section 2.1, and openai/lm-human-preferences (`normalize_before`, `normalize_after`,
`normalize_samples`, `debug_normalize`). A reward model that was trained on comparisons has an arbitrary scale; once its
rewards have mean 0 and deviation 1 on the reference policy, a KL coefficient means the same from model to model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from realign.api import Calibratable, GenerationConfig, MicroBatchSpec, Model, SequenceSample
from realign.data import Dataset, DataSpec, batch_indices
from realign.errors import SettingsError
from realign.functional import score_moments
from realign.settings import Count, Range, Settings

LABEL_ROWS = 1024
"""Rows of the training data that are looked at together for their labels."""


@dataclass
class RewardCalibration(Settings):
    """Which responses to sample, and when to set gain and bias of the reward model by them (config node)."""

    data: DataSpec
    """Prompts: a data node such as `realign.data.PromptData`."""
    role: str = "reward"
    """The reward model; its interface is `Calibratable`, such as `RewardModelInterface`."""
    policy: str = "policy"
    """Whose responses; a role under `models`, which needs no part in the graph (usually the reference policy)."""
    before: bool = False
    """Before training: to the mean and deviation of the labels, where they are ratings, and else to 0 and 1."""
    after: bool = False
    """After training: to 0 and 1. What was saved on the way keeps the gain and bias from before."""
    samples: Annotated[int, Range(ge=2)] = 256
    """Responses; a multiple of `generation.n`."""
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    """How they are sampled, best as the policy will be in training; any settings."""
    batch_prompts: Count = 64
    """Prompts answered at once."""
    verify: bool = False
    """Report mean and deviation of as many other responses afterwards."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples % (n := self.generation.n):
            raise SettingsError(f"samples={self.samples}: must be a multiple of generation.n={n}")
        if not self.before and not self.after:
            raise ValueError("calibration.before and calibration.after are both false: set one, or calibration=null")

    def due(self, when: str) -> bool:
        """Return whether to calibrate "before" or "after" training."""
        return self.before if when == "before" else self.after

    def describe(self) -> str:
        """A row of the table that is shown at launch."""
        times = [when for when in ("before", "after") if self.due(when)]
        return (
            f"gain and bias of {self.role} {' and '.join(times)} training, by {self.samples} responses of "
            f"{self.policy} ({self.generation.describe()})"
        )

    def run(
        self,
        interface: Calibratable,
        reward: Model,
        policy: Model,
        prompts: Dataset,
        mb_spec: MicroBatchSpec,
        *,
        when: str,
        target: tuple[float, float] = (0.0, 1.0),
    ) -> dict[str, float]:
        """Sample, score, and set gain and bias of the interface.

        Args:
            interface: of the reward model.
            reward: the reward model.
            policy: who answers.
            prompts: the dataset of `data`.
            mb_spec: token budget of a forward pass of the reward model.
            when: "before" or "after"; for seeds.
            target: wanted mean and deviation.

        Returns:
            The metrics `calibration/...`: `mean` and `std` found, `gain` and `bias` set, and with `verify`
            `verified_mean` and `verified_std`.

        Raises:
            ValueError: the scores are all the same, or not finite.
        """

        def scores(draw: int) -> Tensor:
            answered = self._answers(policy, prompts, f"calibration/{when}/{draw}", draw)
            return torch.cat([interface.scores(reward, batch, mb_spec) for batch in answered])

        mean, std = interface.normalize(scores(0), mean=target[0], std=target[1], reduce=reward.machine.reduce)
        found = {"mean": mean, "std": std, "gain": interface.gain, "bias": interface.bias}
        if self.verify:
            found["verified_mean"], found["verified_std"] = score_moments(scores(1), reward.machine.reduce)
        return {f"calibration/{name}": value for name, value in found.items()}

    def target(self, interface: Calibratable, dataset: Dataset) -> tuple[float, float]:
        """What rewards should be like before training, by the labels of the training data where it has any."""
        if "labels" not in dataset.keys or not interface.labels_are_numbers:
            return 0.0, 1.0
        starts = range(0, len(dataset), LABEL_ROWS)
        parts = [range(start, min(start + LABEL_ROWS, len(dataset))) for start in starts]
        labels = [dataset.sample([(0, row) for row in rows])["labels"] for rows in parts]
        return interface.label_scale(torch.cat(labels))

    def _answers(self, policy: Model, prompts: Dataset, purpose: str, draw: int) -> Iterator[SequenceSample]:
        """`samples` responses, in batches; draw 1 has other prompts than draw 0, as far as there are enough."""
        rows = batch_indices(len(prompts), self.samples // self.generation.n, draw, policy.seed, shuffle=True)
        for start in range(0, len(rows), self.batch_prompts):
            asked = prompts.sample(rows[start : start + self.batch_prompts]).select(["prompt_ids"])
            yield policy.sampler.generate(asked, self.generation, seed=policy.call_seed(f"{purpose}/{start}"))

"""`RewardCalibration`: normalize the rewards of a policy's responses to a known mean and standard deviation.

Source: arXiv:1909.08593, section 2.1, and openai/lm-human-preferences (`normalize_before`, `normalize_after`,
`normalize_samples`, `debug_normalize`). A reward model trained on comparisons has an arbitrary scale. With mean 0 and
standard deviation 1 on the reference policy, a KL coefficient has the same meaning for every reward model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from realign.api import Calibratable, GenerationConfig, MicroBatchSpec, Model, SequenceSample
from realign.data import Dataset, DataSpec, batch_indices
from realign.errors import ConfigError, SettingsError
from realign.functional import score_moments
from realign.settings import Count, Range, Settings

_LABEL_ROWS = 1024
"""Rows of the training data per batch when reading labels."""


@dataclass
class RewardCalibration(Settings):
    """Calibrates a reward model's gain and bias on sampled responses, before or after training."""

    data: DataSpec
    """Prompts, such as `realign.data.PromptData`."""
    role: str = "reward"
    """Role of the reward model, whose interface must be `Calibratable`, such as `RewardModelInterface`."""
    policy: str = "policy"
    """Role that samples the responses, usually the reference policy. It needs an entry in `models`, but no RPC in the
    graph."""
    before: bool = False
    """Calibrate before training: to the mean and standard deviation of the labels if they are ratings, otherwise to 0
    and 1."""
    after: bool = False
    """Calibrate after training, to mean 0 and standard deviation 1. Models saved during training keep the earlier
    gain and bias."""
    samples: Annotated[int, Range(ge=2)] = 256
    """Number of responses; must be a multiple of `generation.n`."""
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    """Sampling settings; any are allowed. The settings of training are recommended."""
    batch_prompts: Count = 64
    """Prompts per generation batch."""
    verify: bool = False
    """Report mean and standard deviation on the same number of other responses after calibration."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples % (n := self.generation.n):
            raise SettingsError(f"samples={self.samples}: must be a multiple of generation.n={n}")
        if not self.before and not self.after:
            raise SettingsError("before=false and after=false: the calibration never runs. Set one of them to true.")

    def due(self, when: str) -> bool:
        """Return whether to calibrate "before" or "after" training."""
        return self.before if when == "before" else self.after

    def describe(self) -> str:
        """Return a description for the launch table."""
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
        """Sample and score responses, and set gain and bias of the interface.

        Args:
            interface: interface of the reward model.
            reward: the reward model.
            policy: the model that samples the responses.
            prompts: the dataset of `data`.
            mb_spec: token budget of a forward pass of the reward model.
            when: "before" or "after"; part of the random seeds.
            target: target mean and standard deviation.

        Returns:
            The metrics `calibration/...`: measured `mean` and `std`, the new `gain` and `bias`, and with `verify`
            `verified_mean` and `verified_std`.

        Raises:
            RunError: the scores are all equal, or not finite.
        """

        def scores(draw: int) -> Tensor:
            answered = self._answers(policy, prompts, f"calibration/{when}/{draw}", draw)
            return torch.cat([interface.scores(reward, batch, mb_spec) for batch in answered])

        mean, std = interface.normalize(scores(0), mean=target[0], std=target[1], reduce=reward.engine.reduce)
        values = {"mean": mean, "std": std, "gain": interface.gain, "bias": interface.bias}
        if self.verify:
            # other responses, because the mean on the first ones is the target by construction
            values["verified_mean"], values["verified_std"] = score_moments(scores(1), reward.engine.reduce)
        return {f"calibration/{name}": value for name, value in values.items()}

    def target(self, interface: Calibratable, dataset: Dataset) -> tuple[float, float]:
        """Return the target mean and std before training: those of numeric training labels, or else 0 and 1."""
        if "labels" not in dataset.keys or not interface.labels_are_numbers:
            return 0.0, 1.0
        if dataset.size is None:
            raise ConfigError("data.streaming=true: the calibration reads the labels of all rows. Set streaming=false.")
        starts = range(0, len(dataset), _LABEL_ROWS)
        parts = [range(start, min(start + _LABEL_ROWS, len(dataset))) for start in starts]
        labels = [dataset.sample([(0, row) for row in rows])["labels"] for rows in parts]
        return interface.label_scale(torch.cat(labels))

    def _answers(self, policy: Model, prompts: Dataset, purpose: str, draw: int) -> Iterator[SequenceSample]:
        """Yield `samples` responses in batches; draw 1 uses other prompts than draw 0 if there are enough prompts."""
        rows = batch_indices(len(prompts), self.samples // self.generation.n, draw, policy.seed, shuffle=True)
        for start in range(0, len(rows), self.batch_prompts):
            asked = prompts.sample(rows[start : start + self.batch_prompts]).select(["prompt_ids"])
            yield policy.sampler.generate(asked, self.generation, seed=policy.call_seed(f"{purpose}/{start}"))

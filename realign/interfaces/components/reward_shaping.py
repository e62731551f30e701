"""`RewardShaping`: convert the scores of a reward model or function to the scores used in advantage estimation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from realign.api import SequenceSample
from realign.errors import SettingsError
from realign.functional import MomentsKind, Reduce, RunningMoments
from realign.settings import Finite, Positive, Settings


class RewardScale(StrEnum):
    """The standard deviation that scores are divided by."""

    none = "none"
    """Scores are not divided."""
    running = "running"
    """The sample standard deviation of all scores so far, including the current batch."""
    ref = "ref"
    """The sample standard deviation of the scores of the first rollout batch: those of the reference policy."""


class RewardBaseline(StrEnum):
    """A score that is subtracted from all responses of a prompt."""

    none = "none"
    """Nothing is subtracted."""
    greedy = "greedy"
    """The score of the policy's greedy response to the same prompt (ReMax, arXiv:2310.10505)."""


@dataclass
class RewardShaping(Settings):
    """`(score + bias) * gain`, clipped, centered, divided by a standard deviation; minus a baseline."""

    bias: Finite = 0.0
    """Added to every score."""
    gain: Finite = 1.0
    """Factor of score plus bias."""
    clip: Positive | None = None
    """Clip scores to this absolute value after that (trlX: 10, DeepSpeed-Chat: 5); null: don't."""
    scale: RewardScale = RewardScale.none
    """Divide by the standard deviation of all scores so far (running) or of the first batch (ref); none: don't (trlX's
    scale_reward)."""
    center: bool = False
    """Before dividing, subtract the mean of the same scores."""
    baseline: RewardBaseline = RewardBaseline.none
    """Subtract a baseline: none, or greedy, the score of a greedy response, which is then sampled too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gain == 0:
            raise SettingsError("gain=0: all rewards would be equal. Set gain to another number")

    @override
    def ineffective(self) -> dict[str, str]:
        unused = "with scale=none, which computes no mean. Set scale, or center=false"
        return {"center": unused} if self.scale is RewardScale.none else {}

    @property
    def shapes_scores(self) -> bool:
        """Whether scores change, apart from the baseline."""
        plain = (self.bias, self.gain, self.clip) == (0, 1, None)
        return not plain or self.scale is not RewardScale.none

    @property
    def has_baseline(self) -> bool:
        """Whether a baseline is subtracted."""
        return self.baseline is not RewardBaseline.none

    def needs(self) -> dict[str, str]:
        """Return keys that must be in the batch, with the setting that asks for each."""
        return {"baseline_rewards": f"reward.baseline={self.baseline.value}"} if self.has_baseline else {}

    def moments(self) -> RunningMoments:
        """Return new running moments of the scores, which the caller keeps."""
        return RunningMoments(MomentsKind.cumulative, eps=0.0)

    def observe(self, moments: RunningMoments, rewards_S: Tensor, valid_S: Tensor, reduce: Reduce) -> None:
        """Update the moments that `scale` divides by with a rollout batch.

        Args:
            moments: moments of the earlier batches; changed in place.
            rewards_S: [S] unshaped rewards.
            valid_S: [S] bool, the responses that count.
            reduce: sum over ranks.
        """
        if self.scale is RewardScale.running or (self.scale is RewardScale.ref and moments.count == 0):
            moments.update(self._scale_and_clip(rewards_S), valid_S, reduce)

    def shape(self, moments: RunningMoments, rewards_S: Tensor) -> Tensor:
        """Return [S] shaped scores; NaN (no reward) stays NaN."""
        scores_S = self._scale_and_clip(rewards_S)
        if self.center:
            scores_S = scores_S - moments.mean
        # if all scores so far are equal up to rounding, `moments.scale` is 1
        return scores_S if self.scale is RewardScale.none else scores_S / moments.scale

    def baselines(self, moments: RunningMoments, data: SequenceSample) -> Tensor | float:
        """Return [S] the baseline of each response, the shaped `baseline_rewards` of its prompt; 0 without a baseline.

        Raises:
            ValueError: `baseline_rewards` is not one per prompt.
        """
        if "baseline_rewards" not in data:
            return 0.0
        rewards_P = data["baseline_rewards"]
        if len(rewards_P) != len(data):
            raise ValueError(
                f"baseline_rewards has {len(rewards_P)} rewards for {len(data)} prompts. It must have one per prompt"
            )
        return self.shape(moments, rewards_P)[data.group_index()]

    def state_of(self, moments: RunningMoments) -> dict[str, Any]:
        """Return the moments for a checkpoint; empty if they are not used."""
        return {} if self.scale is RewardScale.none else {"moments": moments.state_dict()}

    def restore(self, moments: RunningMoments, state: Mapping[str, Any]) -> None:
        """Restore what `state_of` returned into `moments`."""
        if self.scale is not RewardScale.none:
            moments.load_state_dict(state["moments"])

    def _scale_and_clip(self, rewards_S: Tensor) -> Tensor:
        exact_S = rewards_S.to(torch.promote_types(rewards_S.dtype, torch.float32))  # bf16 would round bias and mean
        scores_S = (exact_S + self.bias) * self.gain
        return scores_S if self.clip is None else scores_S.clamp(-self.clip, self.clip)

    def describe(self) -> str:
        """Return the shaping for the launch table; empty if scores do not change."""
        score = "R" if self.bias == 0 else f"(R {'+' if self.bias > 0 else '-'} {abs(self.bias):g})"
        if self.gain != 1:
            score = f"{self.gain:g} {score}"
        steps = [] if score == "R" else [score]
        steps += [] if self.clip is None else [f"clipped at {self.clip:g}"]
        if self.scale is not RewardScale.none:
            of = "of all scores so far" if self.scale is RewardScale.running else "of the first batch"
            steps.append(f"{'centered and ' if self.center else ''}divided by the std {of}")
        steps += ["minus the score of the greedy response"] if self.baseline is RewardBaseline.greedy else []
        return ", ".join(steps)

"""From what a reward model or rule says to what credit is computed of: shaping of scores, and what being cut off means.

Value objects that an actor interface holds as fields. Their order: affine map, clip, division by a standard deviation
(`RewardShaping.shape`), then what `Truncation` makes of responses that hit the length limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from realign.api.rewards import total_rewards
from realign.functional import MomentsKind, RunningMoments, overlong_penalty, whiten


class RewardScale(StrEnum):
    """What scores are divided by."""

    none = "none"
    """Nothing."""
    running = "running"
    """The sample standard deviation of all scores so far, those of this batch included."""
    ref = "ref"
    """The sample standard deviation of the scores of the first rollout batch: those of the reference policy."""


@dataclass
class RewardShaping:
    """`(score + bias) * gain`, clipped, centred, divided by a standard deviation."""

    bias: float = 0.0
    """Added to every score."""
    gain: float = 1.0
    """Multiplies it then."""
    clip: float | None = None
    """It is then cut off beyond plus or minus this (trlX: 10, DeepSpeed-Chat: 5); null: off."""
    scale: RewardScale = RewardScale.none
    """none | running | ref: what it is divided by in the end (trlX's scale_reward)."""
    center: bool = False
    """Subtract the mean of the same scores before the division; otherwise the mean of scores is left where it is."""
    whiten: bool = False
    """Divide the rewards of tokens, KL penalty and dense rewards included, by their population standard deviation over
    the batch; their mean stays (openai/lm-human-preferences)."""

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"reward.clip must be positive, or null, found {self.clip}")
        if self.center and self.scale is RewardScale.none:
            raise ValueError("reward.center=true takes the mean of the scores of reward.scale, which is none")
        if self.gain == 0:
            raise ValueError("reward.gain=0 would make every reward the same")
        self.moments = RunningMoments(MomentsKind.cumulative, eps=0.0)

    @property
    def shapes_scores(self) -> bool:
        """Whether the score of a response is changed (whitening changes the rewards of tokens)."""
        plain = (self.bias, self.gain, self.clip) == (0, 1, None)
        return not plain or self.scale is not RewardScale.none

    def observe(self, rewards_S: Tensor, valid_S: Tensor, reduce: Callable[[Tensor], Tensor]) -> None:
        """Take a rollout batch into the moments that `scale` divides by.

        Args:
            rewards_S: [S] as judged.
            valid_S: [S] bool, the responses that count.
            reduce: sum over ranks.
        """
        if self.scale is RewardScale.running or (self.scale is RewardScale.ref and self.moments.count == 0):
            self.moments.update(self._clipped(rewards_S), valid_S, reduce)

    def shape(self, rewards_S: Tensor) -> Tensor:
        """The scores [S]; NaN, for no reward, stays NaN."""
        scores_S = self._clipped(rewards_S)
        if self.center:
            scores_S = scores_S - self.moments.mean
        # scores that were all the same so far, up to rounding, have no scale to be divided by: it is 1 then
        return scores_S if self.scale is RewardScale.none else scores_S / self.moments.scale

    def _clipped(self, rewards_S: Tensor) -> Tensor:
        exact_S = rewards_S.to(torch.promote_types(rewards_S.dtype, torch.float32))  # bf16 would round bias and mean
        scores_S = (exact_S + self.bias) * self.gain
        return scores_S if self.clip is None else scores_S.clamp(-self.clip, self.clip)

    def tokens(self, rewards_T: Tensor, mask_T: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """The rewards of tokens [T], whitened where asked for."""
        return whiten(rewards_T, mask_T, shift_mean=False, reduce=reduce) if self.whiten else rewards_T

    def describe(self) -> str:
        """The shaping for people; empty where scores stay as they are."""
        score = "R" if self.bias == 0 else f"(R {'+' if self.bias > 0 else '-'} {abs(self.bias):g})"
        if self.gain != 1:
            score = f"{self.gain:g} {score}"
        steps = [] if score == "R" else [score]
        steps += [] if self.clip is None else [f"clipped at {self.clip:g}"]
        if self.scale is not RewardScale.none:
            of = "of all scores so far" if self.scale is RewardScale.running else "of the first batch"
            steps.append(f"{'centred and ' if self.center else ''}divided by the std {of}")
        steps += ["rewards of tokens divided by their std"] if self.whiten else []
        return ", ".join(steps)

    def state_dict(self) -> dict[str, Any]:
        """The moments of the scores, where they are used."""
        return {} if self.scale is RewardScale.none else {"moments": self.moments.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        if self.scale is not RewardScale.none:
            self.moments.load_state_dict(state["moments"])


class TruncatedReward(StrEnum):
    """What becomes of the score of a response that ended at the length limit, without a stop token."""

    keep = "keep"
    """It stays."""
    zero = "zero"
    """It becomes 0 (realhf's mask_no_eos_with_zero)."""
    add = "add"
    """`penalty` is added to it (TRL's missing_eos_penalty subtracts a positive number)."""
    set = "set"
    """It becomes `penalty`."""


@dataclass
class Truncation:
    """What is made of responses that hit the length limit (`truncated`). Applied to shaped scores."""

    reward: TruncatedReward = TruncatedReward.keep
    """keep | zero | add | set: the score of a truncated response."""
    penalty: float | None = None
    """What reward=add adds (negative, to punish) and what reward=set puts there."""
    mask: bool = False
    """Take truncated responses out of the loss and its divisor (overlong filtering, arXiv:2503.14476)."""
    bootstrap: bool = False
    """What follows the last token of a truncated response is worth the critic's value there, not 0."""
    overlong_buffer: int = 0
    """Tokens before the length limit in which a penalty grows linearly (arXiv:2503.14476, eq. 13); 0: off."""
    overlong_penalty: float = 1.0
    """The penalty at the limit, as a positive number that is subtracted from the score."""

    def __post_init__(self) -> None:
        uses_penalty = self.reward in (TruncatedReward.add, TruncatedReward.set)
        if uses_penalty != (self.penalty is not None):
            raise ValueError(
                f"truncation.reward={self.reward.value} with truncation.penalty={self.penalty}: reward=add and "
                "reward=set, and only they, need a penalty"
            )
        if self.overlong_buffer < 0 or self.overlong_penalty < 0:
            raise ValueError(
                f"truncation.overlong_buffer and overlong_penalty must not be negative, found {self.overlong_buffer} "
                f"and {self.overlong_penalty}"
            )
        if not self.overlong_buffer and self.overlong_penalty != Truncation.overlong_penalty:
            raise ValueError(
                f"truncation.overlong_penalty={self.overlong_penalty:g} has no effect with truncation.overlong_buffer=0"
            )
        if self.mask and (self.reward is not TruncatedReward.keep or self.bootstrap):
            raise ValueError(
                "truncation.mask=true takes truncated responses out of the loss; their reward and value do "
                "not count then, so leave truncation.reward=keep and truncation.bootstrap=false"
            )

    @property
    def changes_scores(self) -> bool:
        """Whether the score of a response depends on its length."""
        return self.reward is not TruncatedReward.keep or self.overlong_buffer > 0

    @property
    def looks(self) -> bool:
        """Whether anything depends on `truncated`."""
        return self.mask or self.bootstrap or self.reward is not TruncatedReward.keep

    def describe(self) -> str:
        """The policy for people; empty where truncated responses are as good as others."""
        new = {TruncatedReward.zero: "score set to 0"}
        if self.penalty is not None:
            change = f"score {'raised' if self.penalty > 0 else 'lowered'} by {abs(self.penalty):g}"
            new |= {TruncatedReward.add: change, TruncatedReward.set: f"score set to {self.penalty:g}"}
        steps = [new[self.reward]] if self.reward in new else []
        steps += ["not in the loss"] if self.mask else []
        steps += ["followed by the critic's value"] if self.bootstrap else []
        if self.overlong_buffer:
            steps.append(f"up to {self.overlong_penalty:g} less over the last {self.overlong_buffer:,} tokens")
        return ", ".join(steps)

    def scores(self, scores_S: Tensor, truncated_S: Tensor | None, tokens_S: Tensor, max_tokens: int) -> Tensor:
        """The scores [S] after the policy.

        Args:
            scores_S: [S] shaped scores; NaN (no score) stays NaN whatever the policy is.
            truncated_S: [S] bool; None only where nothing depends on it.
            tokens_S: [S] sampled tokens.
            max_tokens: the length limit of a response.
        """
        if truncated_S is not None and self.reward is not TruncatedReward.keep:
            penalty = 0.0 if self.penalty is None else self.penalty
            new_S = scores_S + penalty if self.reward is TruncatedReward.add else torch.full_like(scores_S, penalty)
            scores_S = torch.where(truncated_S & scores_S.isfinite(), new_S, scores_S)
        if self.overlong_buffer:
            scores_S = scores_S + overlong_penalty(tokens_S, max_tokens, self.overlong_buffer, self.overlong_penalty)
        return scores_S


__all__ = ["RewardScale", "RewardShaping", "TruncatedReward", "Truncation", "total_rewards"]

"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): sample until a batch is full of informative prompts.

A group whose rewards are all equal has zero advantage and adds nothing to the gradient. With dynamic sampling, the
RPCs that lead to `rewards` are called on one batch of new prompts after another, until `batch_prompts` groups have
passed the filter. The other RPCs of the graph see only those groups. The current policy samples all of them within
the step. Surplus groups are dropped, as in the paper's code, because they would be off-policy in a later step. No row
of the dataset is used twice in a step.

If no group passes because all are solved, the task is learned, and the run ends with its models saved (`TaskSolved`).

The metric `reward` is averaged over the groups that are trained on; `dynamic_sampling/sampled_reward` is averaged
over all sampled groups. The number of rollouts per step varies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from realign.api import Mean, SequenceSample, masked_mean, merge_stats, stat_values
from realign.api.rewards import episode_rewards, total_rewards
from realign.errors import RunError, SettingsError
from realign.functional import degenerate_groups, segment_sum
from realign.settings import Count, Finite, NonNegative, Settings


class TaskSolved(RunError):
    """No prompt is left that the policy doesn't solve. A run ends well then: it saves its models."""


Draw: TypeAlias = Callable[[int], SequenceSample | None]
"""Sample and score one more batch of new prompts (numbered from 0 in each step); None when no prompts are left."""


@dataclass
class DynamicSampling(Settings):
    """Dynamic sampling: samples until enough prompts pass a filter on their rewards."""

    min_reward_std: NonNegative | None = 0.0
    """Keep groups whose rewards have a larger standard deviation than this; 0 drops those whose rewards are all equal.
    null: no such filter."""
    min_mean_reward: Finite | None = None
    """Keep groups with a larger mean reward than this (with rewards 0 and 1, the success rate). null: no such filter.
    """
    max_mean_reward: Finite | None = None
    """Keep groups with a smaller mean reward than this. null: no such filter."""
    min_group_size: Count = 2
    """Keep groups with at least this many responses that have a reward and a trained token (as GRPO's setting of this
    name)."""
    max_batches: Count = 10
    """Sample at most this many batches per step, then train on the groups that passed, if any."""
    generation_prompts: Count | None = None
    """Prompts to sample at a time; null uses `batch_prompts`. More need fewer rounds, but waste more groups."""

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.min_mean_reward, self.max_mean_reward
        if self.min_reward_std is None and low is None and high is None:
            raise SettingsError(
                "min_reward_std=null: no filter is set. Set min_reward_std, min_mean_reward or max_mean_reward, or "
                "dynamic_sampling=null."
            )
        if self.min_reward_std is not None and self.min_group_size < 2:
            raise SettingsError(
                f"min_group_size={self.min_group_size}: the reward of a single response has no standard deviation. Set "
                "2 or more, or min_reward_std=null."
            )
        if low is not None and high is not None and not low < high:
            raise SettingsError(f"min_mean_reward={low:g}: must be below max_mean_reward={high:g}")

    def passes(self, rewards_G: Tensor) -> bool:
        """Return whether to train on a group with these rewards [G]; missing rewards must be removed before."""
        if len(rewards_G) < self.min_group_size:
            return False
        if self.min_reward_std is not None:
            # rewards that differ by rounding only have a tiny std above 0, which the test below would accept
            one_group = torch.zeros_like(rewards_G, dtype=torch.int64)
            if bool(degenerate_groups(rewards_G, one_group, one_group == 0).any()):
                return False
            if float(rewards_G.double().std(correction=0)) <= self.min_reward_std:
                return False
        above = self.min_mean_reward is None or float(rewards_G.double().mean()) > self.min_mean_reward
        return above and not self.is_too_easy(rewards_G)

    def is_too_easy(self, rewards_G: Tensor) -> bool:
        """Return whether the mean of these rewards [G] reaches `max_mean_reward`."""
        return self.max_mean_reward is not None and float(rewards_G.double().mean()) >= self.max_mean_reward

    def choose(self, judged: SequenceSample) -> list[int]:
        """Return the indices of the prompts of a scored batch whose groups pass, in ascending order."""
        return [index for index, rewards_G in enumerate(self.groups(judged)) if self.passes(rewards_G)]

    def groups(self, judged: SequenceSample) -> list[Tensor]:
        """Return the rewards [G] of the responses to each prompt that have a reward and a trained token."""
        rewards_S = total_rewards(judged)
        valid_S = rewards_S.isfinite()
        if "loss_mask" in judged:
            valid_S = valid_S & (segment_sum(judged["loss_mask"], judged.cu_seqlens()) > 0)
        valid_S = judged.once_per_episode(valid_S)
        sizes = judged.lengths["rewards"].counts.tolist()
        return [x_G[valid_G] for x_G, valid_G in zip(rewards_S.split(sizes), valid_S.split(sizes), strict=True)]

    def fill(
        self, batch_prompts: int, draw: Draw, best: float | None = None
    ) -> tuple[SequenceSample, dict[str, float]]:
        """Draw batches until `batch_prompts` prompts have passed, `max_batches` were drawn, or no prompt is left.

        Args:
            batch_prompts: number of prompts of a full batch.
            draw: draws and scores a batch.
            best: see `Sampled.nothing`.

        Returns:
            The first `batch_prompts` prompts that passed, or fewer if not enough passed, in the order of drawing; and
            these metrics, prefixed with `dynamic_sampling/`:

            - `batches`: batches drawn
            - `sampled_prompts`: prompts sampled
            - `accepted_fraction`: fraction of the sampled prompts that passed
            - `surplus_prompts`: prompts that passed and were dropped
            - `missing_prompts`: prompts missing for a full batch
            - `sampled_reward`: mean over all responses with a reward

        Raises:
            TaskSolved: no prompt passed, and the policy solves all of them.
            RunError: no prompt passed for another reason.
        """
        passed: list[SequenceSample] = []
        sampled = Sampled(self)
        batches = 0
        while sampled.passed < batch_prompts and batches < self.max_batches:
            judged = draw(batches)
            if judged is None:
                break
            if chosen := sampled.add(judged):
                passed.append(judged.take(chosen))
            batches += 1
        if not sampled.passed:
            raise sampled.nothing(batches, best)
        values = sampled.metrics() | {
            "batches": float(batches),
            "surplus_prompts": float(max(0, sampled.passed - batch_prompts)),
            "missing_prompts": float(max(0, batch_prompts - sampled.passed)),
        }
        batch = SequenceSample.gather(passed).take(range(min(sampled.passed, batch_prompts)))
        return batch, {f"dynamic_sampling/{name}": value for name, value in values.items()}

    def describe(self) -> str:
        """Return a short description of the filter."""
        parts = [] if self.min_reward_std is None else [f"std of rewards > {self.min_reward_std:g}"]
        parts += [] if self.min_mean_reward is None else [f"mean reward > {self.min_mean_reward:g}"]
        parts += [] if self.max_mean_reward is None else [f"mean reward < {self.max_mean_reward:g}"]
        return ", ".join(parts)


class Sampled:
    """Counts of the prompts that were sampled for a step."""

    def __init__(self, sampling: DynamicSampling) -> None:
        """Count nothing yet, for a filter."""
        self._sampling = sampling
        self._rewards: list[Mean] = []
        self._prompts = 0
        # lowest reward of the groups that aren't too easy for the filter; -inf if one has too few rewards to say
        self._lowest = math.inf
        self.passed = 0
        """Prompts that passed the filter."""

    def add(self, judged: SequenceSample) -> list[int]:
        """Count a scored batch, and return the indices of its prompts that pass."""
        sampling, rewards_S = self._sampling, episode_rewards(judged)
        chosen = sampling.choose(judged)
        self._rewards.append(masked_mean(rewards_S, rewards_S.isfinite()))
        self._prompts += len(judged)
        self.passed += len(chosen)
        for rewards_G in sampling.groups(judged):
            if len(rewards_G) < sampling.min_group_size:
                self._lowest = -math.inf
            elif not sampling.is_too_easy(rewards_G):
                self._lowest = min(self._lowest, float(rewards_G.min()))
        return chosen

    def metrics(self) -> dict[str, float]:
        """Return `sampled_prompts`, and if there are some `accepted_fraction` and `sampled_reward`."""
        values = {"sampled_prompts": float(self._prompts)} | self._mean_reward()
        return values | ({"accepted_fraction": self.passed / self._prompts} if self._prompts else {})

    def nothing(self, batches: int, best: float | None) -> RunError:
        """Return the error for a step in which no prompt passed.

        Args:
            batches: number of batches that were sampled.
            best: highest reward of the responses that were trained on before; None before the first step. The task is
                solved if no response has a lower one. A group may also be too easy for `max_mean_reward`.
        """
        sampling, reward = self._sampling, self._mean_reward().get("sampled_reward")
        rewards = "No response has a reward" if reward is None else f"The mean reward is {reward:.3g}"
        ended = f"max_batches={sampling.max_batches}" if batches == sampling.max_batches else "the end of the dataset"
        none = (
            f"none of {self._prompts} prompts in {batches} batches (up to {ended}) passed the filter "
            f"({sampling.describe()}). {rewards}"
        )
        if best is not None and self._prompts and self._lowest >= best:
            return TaskSolved(f"{none}, and no response got less than the best one before: the task is solved")
        return RunError(
            f"dynamic_sampling: {none}. Check whether the rewards are all equal, the prompts are all too easy or too "
            "hard, or the bounds do not fit the rewards."
        )

    def _mean_reward(self) -> dict[str, float]:
        return stat_values(merge_stats({"sampled_reward": mean} for mean in self._rewards))

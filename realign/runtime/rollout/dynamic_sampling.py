"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): sample until a batch is full of prompts that teach something.

A group whose rewards are all equal has no advantage and thins out its batch. Here the calls that lead to `rewards` are
made on batch after batch of new prompts, until `batch_prompts` groups have passed the filter; the other calls
of the graph see those groups only. All of them are sampled by the present policy within the step: nothing is kept for a
later one. Groups beyond `batch_prompts` are dropped (as in the paper's code), since in a later step they would be
off-policy. No row of the dataset is used twice in a step.

Two things to know when reading curves: the metric `reward` is that of the groups that train, a selection
(`dynamic_sampling/sampled_reward` is that of all); and a step costs as many rollouts as it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from realign.api import Mean, SequenceSample, masked_mean, merge_stats, stat_values
from realign.api.rewards import total_rewards
from realign.functional import degenerate_groups, segment_sum
from realign.settings import Count, Finite, NonNegative, Settings

Draw: TypeAlias = Callable[[int], SequenceSample | None]
"""Sample and judge one more batch of new prompts (numbered from 0 in each step); None when there are none left."""


@dataclass
class DynamicSampling(Settings):
    """Which groups pass, and how long to look for them (config node)."""

    min_reward_std: NonNegative | None = 0.0
    """A group passes if the population deviation of its rewards is above this; at 0: unless all are equal up to
    rounding. null: groups without spread pass too."""
    min_mean_reward: Finite | None = None
    """A group passes if its mean reward is above this (exclusive); with rewards 0 and 1 that is its success rate."""
    max_mean_reward: Finite | None = None
    """A group passes if its mean reward is below this (exclusive)."""
    min_group_size: Count = 2
    """A group passes if so many of its responses have a reward (and a token that trains): GRPO's field of that name."""
    max_batches: Count = 10
    """Batches sampled in a step at most; then the step trains on the groups that passed, if there is any."""
    generation_prompts: Count | None = None
    """Prompts sampled at once; null: `batch_prompts`. More need fewer rounds and drop more groups that passed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.min_mean_reward, self.max_mean_reward
        if self.min_reward_std is None and low is None and high is None:
            raise ValueError(
                "dynamic_sampling filters nothing: give min_reward_std, min_mean_reward or max_mean_reward, or set "
                "dynamic_sampling=null"
            )
        if self.min_reward_std is not None and self.min_group_size < 2:
            raise ValueError(
                f"dynamic_sampling.min_group_size={self.min_group_size}: rewards of one response have no spread; "
                "set 2 or more, or min_reward_std=null"
            )
        if low is not None and high is not None and not low < high:
            raise ValueError(
                f"dynamic_sampling.min_mean_reward={low:g} must be below max_mean_reward={high:g}: no mean is between"
            )

    def passes(self, rewards_G: Tensor) -> bool:
        """Whether a group with these rewards [G] is trained on; those that are missing must not be among them."""
        if len(rewards_G) < self.min_group_size:
            return False
        if self.min_reward_std is not None:
            one_group = torch.zeros_like(rewards_G, dtype=torch.int64)
            if bool(degenerate_groups(rewards_G, one_group, one_group == 0).any()):
                return False
            if float(rewards_G.double().std(correction=0)) <= self.min_reward_std:
                return False
        mean = float(rewards_G.double().mean())
        above = self.min_mean_reward is None or mean > self.min_mean_reward
        return above and (self.max_mean_reward is None or mean < self.max_mean_reward)

    def chosen(self, judged: SequenceSample) -> list[int]:
        """Indices of the prompts of a judged batch whose groups pass, ascending."""
        rewards_S = total_rewards(judged)
        valid_S = rewards_S.isfinite()
        if "loss_mask" in judged:
            valid_S = valid_S & (segment_sum(judged["loss_mask"], judged.cu_seqlens()) > 0)
        sizes = judged.lengths["rewards"].counts.tolist()
        groups = zip(rewards_S.split(sizes), valid_S.split(sizes), strict=True)
        return [index for index, (rewards_G, valid_G) in enumerate(groups) if self.passes(rewards_G[valid_G])]

    def fill(self, batch_prompts: int, draw: Draw) -> tuple[SequenceSample, dict[str, float]]:
        """Draw until `batch_prompts` prompts have passed, `max_batches` were drawn, or no prompt is left.

        Returns:
            The first `batch_prompts` prompts that passed (or all of them, where there are fewer), in the order in which
            they were drawn; and the metrics `dynamic_sampling/...`: `batches` drawn, `sampled_prompts`,
            `accepted_fraction` of them, `surplus_prompts` that passed and were dropped, `missing_prompts` by which the
            batch is short, and `sampled_reward`, the mean over all responses that have one.

        Raises:
            RuntimeError: no prompt passed.
        """
        kept: list[SequenceSample] = []
        rewards: list[Mean] = []
        sampled = accepted = 0
        while accepted < batch_prompts and len(rewards) < self.max_batches:
            judged = draw(len(rewards))
            if judged is None:
                break
            chosen = self.chosen(judged)
            if chosen:
                kept.append(judged.take(chosen))
            sampled, accepted = sampled + len(judged), accepted + len(chosen)
            rewards_S = total_rewards(judged)
            rewards.append(masked_mean(rewards_S, rewards_S.isfinite()))
        values = stat_values(merge_stats({"sampled_reward": mean} for mean in rewards))
        if not accepted:
            raise RuntimeError(self.nothing(sampled, len(rewards), values.get("sampled_reward")))
        values |= {
            "batches": float(len(rewards)),
            "sampled_prompts": float(sampled),
            "accepted_fraction": accepted / sampled,
            "surplus_prompts": float(max(0, accepted - batch_prompts)),
            "missing_prompts": float(max(0, batch_prompts - accepted)),
        }
        batch = SequenceSample.gather(kept).take(range(min(accepted, batch_prompts)))
        return batch, {f"dynamic_sampling/{name}": value for name, value in values.items()}

    def nothing(self, sampled: int, batches: int, reward: float | None) -> str:
        """Why a step has no prompt to train on: of so many, whose rewards have this mean, none passed."""
        found = "none of their responses has a reward" if reward is None else f"their mean reward is {reward:.3g}"
        ended = "max_batches" if batches == self.max_batches else "the end of the dataset"
        return (
            f"dynamic sampling: none of {sampled} prompts in {batches} batches (up to {ended}) passed the filter "
            f"({self.describe()}); {found}. Look at rewards that are always equal, prompts that are all too easy or "
            "too hard, or bounds that fit other rewards"
        )

    def describe(self) -> str:
        """The filter in a few words, for people."""
        parts = [] if self.min_reward_std is None else [f"std of rewards > {self.min_reward_std:g}"]
        parts += [] if self.min_mean_reward is None else [f"mean reward > {self.min_mean_reward:g}"]
        parts += [] if self.max_mean_reward is None else [f"mean reward < {self.max_mean_reward:g}"]
        return ", ".join(parts)

"""Advantage estimators: compute the advantage of every response or token from rewards. One class is one estimator.

An estimator of your own is a subclass of `AdvantageEstimator` with `estimate`:

    class MeanBaseline(AdvantageEstimator):
        def estimate(self, rewards, data, reduce):
            return rewards.per_sequence - rewards.per_sequence.nanmean()

The actor adds the KL penalty and dense rewards to the rewards before the call, and applies `adv_norm` to the result
after it, so an estimator cannot leave them out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from realign.api import Min, SequenceSample, Stats, masked_max, masked_mean, total_rewards
from realign.api.rewards import NAMED
from realign.api.sample import EPISODE
from realign.errors import RunError, SettingsError
from realign.functional import (
    KLEstimator,
    Reduce,
    Scope,
    broadcast_to_tokens,
    degenerate_groups,
    discounted_returns,
    first_of_each,
    gae,
    kl_estimate,
    n_step,
    segment_sum,
    sequence_index,
    token_rewards,
    whiten,
)
from realign.functional.normalization import group_moments, identity
from realign.functional.packed import check_shapes
from realign.interfaces.components.normalization import Normalization
from realign.interfaces.components.reward_shaping import RewardShaping
from realign.interfaces.components.scoring import old_logprobs
from realign.interfaces.components.truncation import Truncation
from realign.settings import Count, Finite, Fraction, Positive, Settings


@dataclass(frozen=True)
class Rewards:
    """The rewards of a batch, with KL penalty and dense rewards included."""

    scores_S: Tensor
    """[S] shaped scores alone; NaN: no reward."""
    mask_T: Tensor
    """[T] bool: the tokens that are trained."""
    cu_seqlens: Tensor
    """int32 [S+1]."""
    kl_T: Tensor | None = None
    """[T] KL to the reference in nats; None: no penalty in the reward."""
    kl_coef: float = 0.0
    """KL coefficient, in reward per nat."""
    dense_T: Tensor | None = None
    """[T] rewards of single tokens; None: there are none."""
    episode_S: Tensor | None = None
    """[S] index of the episode of each sequence; None: every sequence is one."""

    @classmethod
    def of(cls, data: SequenceSample, kl_T: Tensor | None = None, kl_coef: float = 0.0) -> Rewards:
        """Return the rewards of a batch with `rewards`, `loss_mask` and perhaps `dense_rewards`."""
        dense_T, episode_S = data.get("dense_rewards"), data.episode_index() if EPISODE in data else None
        return cls(data["rewards"], data["loss_mask"], data.cu_seqlens(), kl_T, kl_coef, dense_T, episode_S)

    @staticmethod
    def read_rewards(data: SequenceSample) -> Tensor:
        """Return [S] the `rewards` of a batch, and NaN where one of the dense rewards of a response is not finite.

        The metric `missing_rewards` of a run counts the same responses.
        """
        return torch.where(total_rewards(data).isfinite(), data["rewards"], torch.nan)

    @cached_property
    def per_token(self) -> Tensor:
        """[T] reward of every token: dense rewards minus the KL penalty, and the score at the last trained token."""
        rewards_T = token_rewards(self.scores_S, self.mask_T, self.cu_seqlens, kl_T=self.kl_T, kl_coef=self.kl_coef)
        return rewards_T if self.dense_T is None else rewards_T + torch.where(self.mask_T, self.dense_T, 0)

    @cached_property
    def per_sequence(self) -> Tensor:
        """[S] reward of every response: the score plus dense rewards minus the KL penalty, summed over its tokens.

        An agent's response is the whole episode: its tokens are those of all sequences of the episode.
        """
        total_S = self.scores_S
        if self.dense_T is not None:
            total_S = total_S + self._sum(self.dense_T)
        if self.kl_T is not None:
            total_S = total_S - self.kl_coef * self._sum(self.kl_T)
        return total_S

    def _sum(self, x_T: Tensor) -> Tensor:
        sum_S = segment_sum(torch.where(self.mask_T, x_T, 0), self.cu_seqlens)
        if self.episode_S is None:
            return sum_S
        return torch.zeros_like(sum_S).index_add(0, self.episode_S, sum_S)[self.episode_S]

    def with_scores(self, scores_S: Tensor) -> Rewards:
        """Return the same rewards with other scores [S]."""
        return replace(self, scores_S=scores_S)


@dataclass(frozen=True)
class Estimate:
    """Advantages of responses (`advantages_S`) or of tokens (`advantages_T`), before `adv_norm`."""

    advantages_S: Tensor | None = None
    """[S]; every trained token of a response gets its advantage."""
    advantages_T: Tensor | None = None
    """[T]."""
    returns_T: Tensor | None = None
    """[T] targets of a critic."""
    group_T: Tensor | None = None
    """[T] ints: what `adv_norm` compares as one group, for advantages of tokens; None: the responses to a prompt."""
    counted_T: Tensor | None = None
    """[T] bool: the tokens that the statistics of `adv_norm` count, such as one of each turn; None: all."""

    @classmethod
    def of(cls, found: Tensor | Estimate, cu_seqlens: Tensor, estimator: str) -> Estimate:
        """Return an estimate from either return type of `AdvantageEstimator.estimate`.

        Raises:
            ValueError: a plain tensor of another length than S or T, or one that could be either.
        """
        if isinstance(found, Estimate):
            return found
        sequences, tokens = len(cu_seqlens) - 1, int(cu_seqlens[-1])
        # If all lengths are 1, both readings mean the same.
        if sequences == tokens and found.shape == (tokens,) and bool((cu_seqlens.diff() != 1).any()):
            raise ValueError(
                f"{estimator}.estimate returned shape {list(found.shape)} for as many responses as tokens. Return "
                "Estimate(advantages_S=...) or Estimate(advantages_T=...)"
            )
        if found.shape == (sequences,):
            return cls(advantages_S=found)
        if found.shape == (tokens,):
            return cls(advantages_T=found)
        raise ValueError(
            f"{estimator}.estimate returned shape {list(found.shape)}. It must return one advantage per response, "
            f"shape [{sequences}], or one per token, shape [{tokens}]"
        )


@dataclass
class AdvantageEstimator(Settings, ABC):
    """Base class of advantage estimators."""

    reads: ClassVar[frozenset[str]] = frozenset()
    """Keys of the batch that `estimate` needs; the dataflow must provide them."""
    uses: ClassVar[frozenset[str]] = frozenset()
    """Keys of the batch that `estimate` reads if the dataflow provides them."""
    gives_returns: ClassVar[bool] = False
    """Whether `estimate` returns targets for a critic."""
    needs_rewards: ClassVar[bool] = True
    """Whether the dataflow must provide rewards; without them all scores are 0."""

    @abstractmethod
    def estimate(self, rewards: Rewards, data: SequenceSample, reduce: Reduce) -> Tensor | Estimate:
        """Estimate the advantages of a batch, before `adv_norm`.

        Args:
            rewards: per token and per sequence; NaN where a response has no reward.
            data: the batch, whose `loss_mask` [T] holds the tokens that are trained; `data.group_index()` [S] is the
                prompt of each response, and `data.once_per_episode(mask_S)` counts the episodes of agents.
            reduce: sum over ranks, for statistics of the whole batch.

        Returns:
            [S] or [T]; values of responses or tokens that are not trained are ignored. With `gives_returns`, an
            `Estimate`.
        """

    def keep(self, data: SequenceSample) -> Tensor | None:
        """Return [S] bool: responses that stay in the loss; None: all that have a reward and a trained token."""
        return None

    def rescale(self, rewards: Rewards, data: SequenceSample, valid_S: Tensor, reduce: Reduce) -> Tensor | None:
        """Return a scalar that multiplies the advantages after `adv_norm`; None: 1."""
        return None

    def check(self, *, responses: int, adv_norm: Normalization, reward: RewardShaping, truncation: Truncation) -> None:
        """Reject settings of the actor under which advantages would be wrong or all 0.

        Args:
            responses: number of responses per prompt.
            adv_norm: the normalization that follows.
            reward: what changes scores before; a baseline is the same for all responses to a prompt.
            truncation: what changes the scores of truncated responses.

        Raises:
            SettingsError: names the setting.
        """

    def needs(self) -> dict[str, str]:
        """Return keys that must be in the batch under the current settings, with the setting that asks for each."""
        return dict.fromkeys(self.reads, f"advantage={type(self).__name__}")

    def stats(self, data: SequenceSample) -> Stats:
        """Return additional metrics of the rollout batch."""
        return {}

    def describe(self) -> str:
        """Return the estimator for the launch table."""
        return type(self).__name__


@dataclass
class _ValueBased(AdvantageEstimator):
    """Base class of estimators of token advantages from rewards and values; without a critic all values are 0."""

    uses: ClassVar[frozenset[str]] = frozenset({"values", "bootstrap_values", "truncated"})
    gives_returns: ClassVar[bool] = True

    gamma: Fraction = 1.0
    """Discount per trained token."""
    reward_norm: Normalization = field(
        default_factory=lambda: Normalization(mean=Scope.none, std=Scope.none), kw_only=True
    )
    """Normalization of scores, one per response, before KL penalty and dense rewards are added. With a mean over the
    group and whitening by `adv_norm` this is REINFORCE++-baseline."""
    whiten_rewards: bool = field(default=False, kw_only=True)
    """Divide the rewards of tokens, KL penalty and dense rewards included, by their population standard deviation over
    the batch; the mean stays (openai/lm-human-preferences)."""
    bootstrap: bool = field(default=False, kw_only=True)
    """For a truncated response, use the critic's value of its last state, instead of 0."""

    @override
    def estimate(self, rewards: Rewards, data: SequenceSample, reduce: Reduce) -> Estimate:
        """Return advantages and returns of tokens."""
        mask_T, cu_seqlens = rewards.mask_T, rewards.cu_seqlens
        if self.reward_norm.active:
            trained_S = segment_sum(mask_T, cu_seqlens) > 0
            counted_S, group_S = data.once_per_episode(trained_S), data.group_index()
            scores_S = self.reward_norm(rewards.scores_S, group_S, trained_S, reduce, counted_S)
            rewards = rewards.with_scores(scores_S)
        rewards_T = rewards.per_token
        if self.whiten_rewards:
            rewards_T = whiten(rewards_T, mask_T, shift_mean=False, reduce=reduce)
        values_T = data["values"] if "values" in data else torch.zeros_like(rewards_T)
        bootstrap_S = torch.where(data["truncated"], data["bootstrap_values"], 0) if self.bootstrap else None
        advantages_T, returns_T = self._from_values(rewards_T, values_T, mask_T, cu_seqlens, bootstrap_S)
        return Estimate(advantages_T=advantages_T, returns_T=returns_T)

    @abstractmethod
    def _from_values(
        self, rewards_T: Tensor, values_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, bootstrap_S: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return advantages and returns [T]; `bootstrap_S` [S] are values after the last token."""

    @abstractmethod
    def _name(self) -> str:
        """Return the estimator for the launch table."""

    @override
    def check(self, *, responses: int, adv_norm: Normalization, reward: RewardShaping, truncation: Truncation) -> None:
        _check_groups("advantage.reward_norm", self.reward_norm, responses)

    @override
    def needs(self) -> dict[str, str]:
        return dict.fromkeys(("bootstrap_values", "truncated"), "advantage.bootstrap=true") if self.bootstrap else {}

    @override
    def describe(self) -> str:
        steps = [self._name()]
        steps += [f"scores normalized: {self.reward_norm.describe('R')}"] if self.reward_norm.active else []
        steps += ["rewards of tokens divided by their std"] if self.whiten_rewards else []
        steps += ["truncated responses end with the critic's value"] if self.bootstrap else []
        return "; ".join(steps)


@dataclass
class GAE(_ValueBased):
    """Generalized advantage estimation (arXiv:1506.02438); without a critic all values are 0.

    With lam=1 and no critic the advantage of a token is the discounted sum of the rewards from it on, as in REINFORCE++
    (arXiv:2501.03262).
    """

    lam: Fraction = 0.95
    """Lambda of the exponential average."""

    def _from_values(
        self, rewards_T: Tensor, values_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, bootstrap_S: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        rates = {"gamma": self.gamma, "lam": self.lam}
        return gae(rewards_T, values_T, mask_T, cu_seqlens, **rates, bootstrap_S=bootstrap_S)

    def _name(self) -> str:
        return f"GAE, gamma {self.gamma:g}, lambda {self.lam:g}"


@dataclass
class NStep(_ValueBased):
    """n-step returns: the next n rewards plus the critic's value after them, minus the value; without a critic 0.

    n=1 is GAE with lam=0, and n of at least the length of a response is GAE with lam=1 (Monte Carlo returns).
    """

    n: Count = 8
    """Number of rewards in a return, counted in trained tokens."""

    def _from_values(
        self, rewards_T: Tensor, values_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, bootstrap_S: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return n_step(rewards_T, values_T, mask_T, cu_seqlens, gamma=self.gamma, n=self.n, bootstrap_S=bootstrap_S)

    def _name(self) -> str:
        return f"{self.n}-step returns, gamma {self.gamma:g}"


@torch.no_grad()
def degenerate_rescale(x_N: Tensor, group_N: Tensor, mask_N: Tensor, reduce: Reduce = identity) -> Tensor:
    """Compute B / (B - M), where M of the B elements are in `degenerate_groups`.

    Source: GPG (arXiv:2504.02546, its alpha), where it multiplies the advantages. In a mean over sequences, this is
    equivalent to excluding constant groups from the sum and from its divisor. In verl's `gpg`, M is instead the
    number of responses with a reward of 0, before subtracting the mean. With rewards of 0 and 1, verl thus divides by
    the fraction of correct answers.

    Args:
        x_N: [N] scores.
        group_N: [N] ints.
        mask_N: [N] bool.
        reduce: sums over ranks.

    Returns:
        A scalar, fp64, at least 1; 1 when every group is constant.
    """
    check_shapes(mask_N, x_N=x_N, group_N=group_N, mask_N=mask_N)
    of = group_moments(x_N[mask_N].double(), group_N[mask_N])
    total, informative = reduce(torch.stack([of.count_U.sum(), of.count_U[~of.degenerate_U].sum()])).unbind(0)
    return torch.where(informative > 0, total / informative.clamp(min=1), 1)


@dataclass
class _Grouped(AdvantageEstimator):
    """Base class of estimators that compare the responses to one prompt."""

    min_group_size: Count = 2
    """Drop groups with fewer rewarded responses from the loss."""

    @override
    def check(self, *, responses: int, adv_norm: Normalization, reward: RewardShaping, truncation: Truncation) -> None:
        _check_groups("adv_norm", adv_norm, responses)
        if self.min_group_size > responses:
            raise SettingsError(
                f"advantage.min_group_size={self.min_group_size}: must be at most generation.n={responses}"
            )
        if reward.has_baseline and adv_norm.mean is Scope.group:
            raise SettingsError(
                "reward.baseline=greedy: subtracts the same number from every response of a group, which "
                "adv_norm.mean=group cancels. Set adv_norm.mean=none (ReMax)"
            )

    @override
    def keep(self, data: SequenceSample) -> Tensor:
        """Return the responses of groups that are large enough."""
        valid_S, size_S = self._sizes(data)
        return valid_S & (size_S >= self.min_group_size)

    @override
    def stats(self, data: SequenceSample) -> Stats:
        """Return the fraction of groups whose rewards are all equal, before a KL in the reward."""
        cu_seqlens, mask_T = data.cu_seqlens(), data["loss_mask"]
        valid_S = segment_sum(mask_T, cu_seqlens) > 0
        counted_S = data.once_per_episode(valid_S)
        flat_G = degenerate_groups(Rewards.of(data).per_sequence, data.group_index(), counted_S)
        return {"zero_std_fraction": masked_mean(flat_G.float(), torch.ones_like(flat_G))}

    @staticmethod
    def _sizes(data: SequenceSample) -> tuple[Tensor, Tensor]:
        """Return [S] bool whether a response has a reward and trains, and the number of such responses in its group."""
        group_S = data.group_index()
        valid_S = data["rewards"].isfinite() & (segment_sum(data["loss_mask"], data.cu_seqlens()) > 0)
        # Episodes, not sequences: an agent's episode with three sequences is still one sample of its prompt.
        counted_S = data.once_per_episode(valid_S).long()
        return valid_S, torch.zeros_like(group_S).index_add(0, group_S, counted_S)[group_S]

    @staticmethod
    def _normalize(x_S: Tensor, norm: Normalization, data: SequenceSample, reduce: Reduce) -> Tensor:
        """Return [S] a part of the reward, normalized over the trained responses that have it; 0 for the others."""
        has_S = x_S.isfinite() & (segment_sum(data["loss_mask"], data.cu_seqlens()) > 0)
        return norm(x_S, data.group_index(), has_S, reduce, data.once_per_episode(has_S))


@dataclass
class GroupRelative(_Grouped):
    """The reward of a response, to be compared within its prompt's group by `adv_norm` (GRPO, arXiv:2402.03300)."""

    length_weighted: bool = False
    """Weight each response by its length in the statistics of `adv_norm` (OPO, arXiv:2505.23585)."""
    rescale_degenerate: bool = False
    """Multiply advantages by B / (B - M) (GPG, arXiv:2504.02546). B is the number of responses in the batch; M of them
    are in groups of equal rewards, whose advantages are 0."""

    @override
    def estimate(self, rewards: Rewards, data: SequenceSample, reduce: Reduce) -> Estimate:
        return _of_responses(rewards.per_sequence, rewards, self.length_weighted)

    @override
    def check(self, *, responses: int, adv_norm: Normalization, reward: RewardShaping, truncation: Truncation) -> None:
        super().check(responses=responses, adv_norm=adv_norm, reward=reward, truncation=truncation)
        if self.rescale_degenerate and adv_norm.mean is not Scope.group:
            raise SettingsError(
                "advantage.rescale_degenerate=true: groups with equal rewards have advantages of 0 only with "
                f"adv_norm.mean=group, found adv_norm.mean={adv_norm.mean.value}. Set adv_norm.mean=group"
            )

    @override
    def rescale(self, rewards: Rewards, data: SequenceSample, valid_S: Tensor, reduce: Reduce) -> Tensor | None:
        if not self.rescale_degenerate:
            return None
        return degenerate_rescale(rewards.per_sequence, data.group_index(), data.once_per_episode(valid_S), reduce)

    @override
    def describe(self) -> str:
        weighted = ", responses weighted by length" if self.length_weighted else ""
        rescaled = ", times B / (B - M)" if self.rescale_degenerate else ""
        return f"reward of the response{weighted}, at each of its tokens{rescaled}"


_CENTERED = Normalization(mean=Scope.group, std=Scope.none)


@dataclass
class Gdpo(_Grouped):
    """The weighted sum of named rewards, each normalized in its group; then `adv_norm` over the batch (GDPO).

    Source: arXiv:2601.05242. In a sum that is normalized afterwards, as in GRPO, a reward with a large spread hides the
    others, and different combinations of rewards can get the same advantage. KL penalty and dense rewards have a scale
    that their coefficient sets, so they are compared within the group without a division, and added to the sum. A
    response without one of the rewards (NaN) gets 0 for that reward, and has no part in its statistics.

    The paper and TRL take the statistics of the batch over responses, verl over tokens (`length_weighted`). The only
    response of a group gets 0, in verl its reward. verl ignores a KL in the reward, ms-swift turns it off.
    """

    weights: dict[str, Finite] = field(default_factory=dict)
    """Weight of each named reward after it is normalized, such as `{correct: 1, format: 0.5}`. Those not named have no
    part in it; the weights of `interfaces.reward.functions` neither."""
    reward_norm: Normalization = field(default_factory=lambda: Normalization(mean=Scope.group, std=Scope.group))
    """Normalization of each named reward."""
    length_weighted: bool = False
    """Weight each response by its length in the statistics of `adv_norm`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.weights:
            raise SettingsError("weights={}: has no reward. Set the weights of rewards by name, such as {correct: 1}")

    @override
    def estimate(self, rewards: Rewards, data: SequenceSample, reduce: Reduce) -> Estimate:
        penalties_S = rewards.per_sequence - rewards.scores_S
        total_S = self._normalize(penalties_S, _CENTERED, data, reduce)
        for key, weight in sorted((f"{NAMED}{name}", weight) for name, weight in self.weights.items()):
            named_S = torch.where(rewards.scores_S.isfinite(), data[key], torch.nan)
            total_S = total_S + weight * self._normalize(named_S, self.reward_norm, data, reduce)
        return _of_responses(total_S, rewards, self.length_weighted)

    @override
    def check(self, *, responses: int, adv_norm: Normalization, reward: RewardShaping, truncation: Truncation) -> None:
        super().check(responses=responses, adv_norm=adv_norm, reward=reward, truncation=truncation)
        _check_groups("advantage.reward_norm", self.reward_norm, responses)
        if reward.has_baseline or reward.shapes_scores or truncation.changes_scores:
            raise SettingsError(
                "advantage=gdpo: normalizes each named reward, and `reward` and `truncation` change only their sum. "
                "Remove their settings, or add a reward function (truncation.mask=true works)"
            )

    @override
    def needs(self) -> dict[str, str]:
        return super().needs() | {f"{NAMED}{name}": f"advantage.weights.{name}" for name in self.weights}

    @override
    def describe(self) -> str:
        each = self.reward_norm.describe("R")
        terms = " + ".join(f"{weight:g} x {name}" for name, weight in sorted(self.weights.items()))
        return f"{terms}, each {each}{', responses weighted by length' if self.length_weighted else ''}"


@dataclass
class MaxRL(_Grouped):
    """(reward - mean) / mean over the responses to a prompt, the gradient of the log of the success rate (MaxRL).

    Source: arXiv:2602.02710, SkyRL, prime-rl. Groups without a success get 0. Use it without `adv_norm`. The KL penalty
    has no part in the mean that divides: it is compared within the group, and added.

    A mean below 0 would invert all signs, so a negative score is an error; SkyRL divides by it. With
    `min_group_size=1`, the only response of a group gets its reward, which is REINFORCE, as in SkyRL and the paper's
    T=1. In prime-rl (pull request 2985) it got (1 - 1) / 1 = 0, so nothing trained with its default group size of 1.
    """

    @override
    def estimate(self, rewards: Rewards, data: SequenceSample, reduce: Reduce) -> Estimate:
        if bool((rewards.scores_S < 0).any()):
            lowest = float(rewards.scores_S.nan_to_num().min())
            raise RunError(
                f"advantage=max_rl: a reward is {lowest:g}, and MaxRL divides by the mean reward of a prompt. Make "
                "rewards at least 0, or set another advantage"
            )
        task_S = replace(rewards, kl_T=None).per_sequence
        above_S = self._normalize(task_S, _CENTERED, data, reduce)
        mean_S = task_S - above_S
        relative_S = torch.where(mean_S > 0, above_S / mean_S, 0)
        relative_S = torch.where(self._sizes(data)[1] == 1, task_S, relative_S)
        penalties_S = self._normalize(rewards.per_sequence - task_S, _CENTERED, data, reduce)
        return Estimate(advantages_S=relative_S + penalties_S)

    @override
    def check(self, *, responses: int, adv_norm: Normalization, reward: RewardShaping, truncation: Truncation) -> None:
        super().check(responses=responses, adv_norm=adv_norm, reward=reward, truncation=truncation)
        if adv_norm.std is Scope.group or reward.has_baseline or reward.center:
            wrong = "reward.center=true: makes rewards negative" if reward.center else "adv_norm.std=group: gives GRPO"
            wrong = "reward.baseline=greedy: makes rewards negative" if reward.has_baseline else wrong
            raise SettingsError(
                f"{wrong} with advantage=max_rl, which divides by the mean of the group. Set adv_norm.mean=none, "
                "adv_norm.std=none, reward.baseline=none and reward.center=false"
            )

    @override
    def describe(self) -> str:
        alone = "; the reward itself in a group of one" if self.min_group_size == 1 else ""
        return f"(reward - mean of the group) / mean of the group{alone}"


class TurnGroup(StrEnum):
    """The turns that are compared with each other."""

    turn = "turn"
    """The same turn of the prompt's other episodes: first turns with first turns."""
    prompt = "prompt"
    """All turns of the prompt's episodes."""


@dataclass
class TurnReturns(_Grouped):
    """Credit for turns: the rewards from a turn on, discounted over turns, compared by `adv_norm` with other turns.

    The return of turn k is G_k = r_k + gamma G_(k+1), as in AReaL (`turn_discount`) and Kevin (arXiv:2507.11948), which
    compares all turns of a prompt. All tokens of a turn get its advantage, and statistics count a turn once. What
    belongs to no turn, such as the score of a further reward function, is a reward of the last turn; a KL in the reward
    is one of the turn of its token.

    Returns are compared, not rewards. MT-GRPO (arXiv:2505.11821) normalizes the reward of each turn and adds up the
    results, whose baseline then depends on how many turns the policy takes: a bias toward shorter or longer episodes.
    """

    reads: ClassVar[frozenset[str]] = frozenset({"turn_index", "turn_rewards"})

    gamma: Fraction = 1.0
    """Discount per turn."""
    compare: TurnGroup = TurnGroup.turn
    """Which turns `adv_norm` compares with scope group: turn or prompt."""

    @override
    def estimate(self, rewards: Rewards, data: SequenceSample, reduce: Reduce) -> Estimate:
        sequence_T, turn_T = sequence_index(rewards.cu_seqlens), data["turn_index"].long()
        episode_S = data.episode_index()
        episodes, turns = int(episode_S.max()) + 1, max(1, int(turn_T.max()) + 1)
        on_T = rewards.mask_T & (turn_T >= 0)
        cell_T = torch.where(on_T, episode_S[sequence_T] * turns + turn_T, 0)
        reward_T = data["turn_rewards"].to(torch.float64)
        if rewards.kl_T is not None:
            reward_T = reward_T - rewards.kl_coef * rewards.kl_T
        reward_EK = reward_T.new_zeros(episodes * turns).index_add(0, cell_T, torch.where(on_T, reward_T, 0))
        reward_EK = reward_EK.view(episodes, turns)
        last_E = turn_T.new_zeros(episodes).scatter_reduce(
            0, episode_S[sequence_T], torch.where(on_T, turn_T, 0), "amax"
        )
        total_E = reward_T.new_zeros(episodes).index_copy(0, episode_S, rewards.per_sequence.double())
        rest_E = total_E - reward_EK.sum(1)
        return_EK = reward_EK.scatter_add(1, last_E[:, None], rest_E[:, None])
        for k in reversed(range(turns - 1)):
            return_EK[:, k] += self.gamma * return_EK[:, k + 1]
        group_T = data.group_index()[sequence_T]
        return Estimate(
            advantages_T=return_EK.view(-1)[cell_T].to(rewards.per_sequence.dtype),
            group_T=group_T * turns + turn_T.clamp(min=0) if self.compare is TurnGroup.turn else group_T,
            counted_T=first_of_each(cell_T, on_T),
        )

    @override
    def check(self, *, responses: int, adv_norm: Normalization, reward: RewardShaping, truncation: Truncation) -> None:
        super().check(responses=responses, adv_norm=adv_norm, reward=reward, truncation=truncation)
        if reward.shapes_scores:
            raise SettingsError(
                "advantage=turn_returns: takes the rewards of turns as they are, and `reward` changes only their sum. "
                "Remove its settings, or change them in the environment"
            )

    @override
    def describe(self) -> str:
        others = {TurnGroup.turn: "the same turn", TurnGroup.prompt: "all turns"}[self.compare]
        return f"rewards from each turn on, gamma {self.gamma:g} per turn, against {others} of the prompt's episodes"


@dataclass
class TeacherKL(AdvantageEstimator):
    """Log-ratio of teacher to policy at the sampled token: on-policy distillation by policy gradient.

    Minus the log-ratio is an unbiased estimate of the reverse KL at this position, so the policy gradient minimizes the
    reverse KL to the teacher. The advantage of a token is the discounted sum of `coef` times the log-ratio plus the
    reward of the token. Rewards are optional: the score of a response, KL penalty and dense rewards.
    """

    reads: ClassVar[frozenset[str]] = frozenset({"teacher_logprobs"})
    needs_rewards: ClassVar[bool] = False

    coef: Positive = 1.0
    """Weight of the log-ratio, in reward per nat."""
    gamma: Fraction = 0.0
    """Discount per trained token. 0: a token is credited with its own log-ratio only. 1: also with the effect on all
    later tokens, which is the gradient of the reverse KL of whole sequences and has a larger variance."""

    @override
    def estimate(self, rewards: Rewards, data: SequenceSample, reduce: Reduce) -> Estimate:
        """Return advantages of tokens."""
        rewards_T = rewards.per_token - self.coef * self._kl(data)
        returns_T = discounted_returns(rewards_T, rewards.mask_T, rewards.cu_seqlens, gamma=self.gamma)
        return Estimate(advantages_T=returns_T)

    @override
    def stats(self, data: SequenceSample) -> Stats:
        """Return the estimated reverse KL to the teacher, in nats per token."""
        return {"teacher_kl": masked_mean(self._kl(data), data["loss_mask"])}

    @staticmethod
    def _kl(data: SequenceSample) -> Tensor:
        """Return [T] log-ratio of policy to teacher, 0 off the mask."""
        return kl_estimate(old_logprobs(data), data["teacher_logprobs"], data["loss_mask"], KLEstimator.k1)

    @override
    def describe(self) -> str:
        return f"rewards + {self.coef:g} x log-ratio of teacher to policy per token, gamma {self.gamma:g}"


def _of_responses(advantages_S: Tensor, rewards: Rewards, length_weighted: bool) -> Estimate:
    """Return an estimate of which `adv_norm` counts each response once, or once per token with `length_weighted`."""
    if length_weighted:
        return Estimate(advantages_T=advantages_S[sequence_index(rewards.cu_seqlens)])
    return Estimate(advantages_S=advantages_S)


def advantage_stats(data: SequenceSample) -> Stats:
    """Return metrics of `advantages` [T], over the tokens that train."""
    mask_T, advantages_T = data["loss_mask"], data["advantages"]
    return {
        "advantage_mean": masked_mean(advantages_T, mask_T),
        "advantage_max": masked_max(advantages_T, mask_T),
        "advantage_min": Min(-masked_max(-advantages_T, mask_T).value),
    }


def _check_groups(name: str, norm: Normalization, responses: int) -> None:
    if responses < 2 and norm.compares_groups:
        more = " with advantage.min_group_size=1" if name == "adv_norm" else ""
        raise SettingsError(
            f"generation.n={responses}: {name} compares the responses to a prompt, so every advantage would be 0. Set "
            f"generation.n to 2 or more, or {name}.mean=batch and {name}.std=batch{more}"
        )


def normalize_advantages(
    estimate: Estimate, data: SequenceSample, valid_S: Tensor, norm: Normalization, reduce: Reduce
) -> Tensor:
    """Return [T] advantages after `adv_norm`, 0 off the mask; response advantages are normalized, then broadcast."""
    cu_seqlens, group_S, mask_T = data.cu_seqlens(), data.group_index(), data["loss_mask"]
    if estimate.advantages_S is not None:
        # Before broadcasting: afterwards, a response would count once per token in the mean and std of its group.
        advantages_S = norm(estimate.advantages_S, group_S, valid_S, reduce, data.once_per_episode(valid_S))
        return torch.where(mask_T, broadcast_to_tokens(advantages_S, cu_seqlens), 0)
    assert estimate.advantages_T is not None
    group_T = group_S[sequence_index(cu_seqlens)] if estimate.group_T is None else estimate.group_T
    return norm(estimate.advantages_T, group_T, mask_T, reduce, estimate.counted_T)

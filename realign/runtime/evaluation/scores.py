"""Metrics of scored responses, and their standard errors.

Shapes: S sequences, G prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

import torch
from torch import Tensor

from realign.api import Mean, SequenceSample, Stats, masked_mean, merge_stats, stat_values
from realign.api.environment import EpisodeFailure
from realign.api.rewards import episode_rewards, named_rewards, total_rewards
from realign.api.sample import EPISODE
from realign.api.stats import masked_std
from realign.errors import SettingsError
from realign.functional import segment_sum
from realign.functional.pass_at_k import pass_at_k

DISTINCT, MOST_COMMON, CONSTANT = "distinct_fraction", "most_common_fraction", "constant_reward"
SEQUENCE_METRICS = frozenset(
    {"reward", "missing_rewards", "response_tokens", "truncated_fraction", DISTINCT, MOST_COMMON, CONSTANT}
)
FAILURES = tuple(f"failures/{kind}" for kind in EpisodeFailure)
"""Metrics of environments and agents that fail."""
FEW_DISTINCT, MANY_EQUAL = 1 / 8, 1 / 2
"""A policy has collapsed onto one response if at most `FEW_DISTINCT` of its responses are distinct, and at least
`MANY_EQUAL` are the same one."""


@dataclass(frozen=True)
class Scored:
    """One batch of an evaluation."""

    batch: SequenceSample
    """The responses with their rewards."""
    ending: str = ""
    """Suffix of the metric names, which names the value of a swept setting; empty for the configured settings."""
    per_sequence: Mapping[str, Tensor] = field(default_factory=dict)
    """[S] values by metric, in addition to `_sequence_values`. NaN is a missing value."""
    per_prompt: Mapping[str, Tensor] = field(default_factory=dict)
    """[G] values by metric, NaN for prompts without a value."""

    @property
    def stats(self) -> Stats:
        """The metrics of the batch, each as a mean over its sequences or prompts."""
        further = {name: _mean(x) for name, x in [*self.per_sequence.items(), *self.per_prompt.items()]}
        return sequence_stats(self.batch) | further


def merge_scored(
    parts: Iterable[Scored], constant_reward: Callable[[Tensor], float | None] = lambda response: None
) -> tuple[dict[str, float], SequenceSample]:
    """Return the metrics `eval/...` of all batches, and the first batch.

    Args:
        parts: at least one batch. The batches of a sweep are grouped by their `ending`.
        constant_reward: returns the mean reward of one response (ids) to every prompt, or None if it is unknown or
            expensive. Called only if the policy has collapsed onto this response.
    """
    stats: dict[str, list[Stats]] = {}
    repeats: dict[str, Repeats] = {}
    first: SequenceSample | None = None
    for part in parts:
        stats.setdefault(part.ending, []).append(part.stats)
        repeats.setdefault(part.ending, Repeats()).add(part.batch)
        first = first or part.batch
    assert first is not None
    values = {
        f"eval/{name}{ending}": value
        for ending, batches in stats.items()
        for name, value in (stat_values(merge_stats(batches)) | repeats[ending].metrics()).items()
    }
    response = repeats[""].collapsed if "" in repeats else None
    if response is not None and (reward := values.get("eval/reward")) is not None:
        # if all responses are equal, their mean reward is already that of the constant answer
        constant = reward if repeats[""].metrics()[MOST_COMMON] == 1 else constant_reward(response)
        values |= {} if constant is None else {f"eval/{CONSTANT}": constant}
    return values, first


class Repeats:
    """Counts how often a policy gives the same response to different prompts."""

    def __init__(self) -> None:
        self._counts: Counter[bytes] = Counter()
        self._repeated: dict[bytes, Tensor] = {}

    def add(self, batch: SequenceSample) -> None:
        """Count the sampled tokens of each response of a batch."""
        if not {"input_ids", "prompt_mask"} <= batch.keys:
            return
        for ids, given in zip(batch.sequences("input_ids"), batch.sequences("prompt_mask"), strict=True):
            response = ids[~given].cpu()
            # 16 bytes per response instead of its tokens: an evaluation may have very many
            key = blake2b(response.numpy().tobytes(), digest_size=16).digest()
            self._counts[key] += 1
            if self._counts[key] == 2:  # not the first time, so that distinct responses take no memory
                self._repeated[key] = response

    def metrics(self) -> dict[str, float]:
        """Return the number of distinct responses and the count of the most common one, as fractions of all."""
        total = self._counts.total()
        if not total:
            return {}
        return {DISTINCT: len(self._counts) / total, MOST_COMMON: self._counts.most_common(1)[0][1] / total}

    @property
    def collapsed(self) -> Tensor | None:
        """The response (ids) onto which the policy has collapsed; None if it has not."""
        if not is_collapsed(self.metrics()):
            return None
        return self._repeated[self._counts.most_common(1)[0][0]]


def is_collapsed(metrics: Mapping[str, float], prefix: str = "") -> bool:
    """Return whether metrics of an evaluation, with names that start with `prefix`, are of a collapsed policy."""
    distinct, most_common = metrics.get(f"{prefix}{DISTINCT}", 1.0), metrics.get(f"{prefix}{MOST_COMMON}", 0.0)
    return distinct <= FEW_DISTINCT and most_common >= MANY_EQUAL


class StandardErrors:
    """Standard errors of the means in the metrics of an evaluation, where the prompts are independent draws.

    Responses to one prompt are correlated. Each prompt is therefore one cluster: the standard error is
    sqrt(G / (G - 1) * sum_g (s_g - n_g * mean)^2) / sum_g n_g for prompts with sums s_g over n_g values. With equally
    many responses to each prompt, this is the standard error of the mean of the prompts' means.
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def add(self, scored: Scored) -> None:
        """Add a batch."""
        group_S, prompts = scored.batch.group_index(), len(scored.batch)
        values = [(name, x_S, group_S) for name, x_S in _sequence_values(scored.batch).items()]
        values += [(name, x_S, group_S) for name, x_S in scored.per_sequence.items()]
        values += [(name, x_G, torch.arange(prompts)) for name, x_G in scored.per_prompt.items()]
        for name, x, group in values:
            present, zeros = x.isfinite(), torch.zeros(prompts, dtype=torch.float64)
            sum_G = zeros.index_add(0, group.cpu(), torch.where(present, x, 0).double().cpu())
            count_G = zeros.index_add(0, group.cpu(), present.double().cpu())
            self._sums.setdefault(f"eval/{name}{scored.ending}", []).append((sum_G, count_G))

    def values(self) -> dict[str, float]:
        """Return the standard error of each mean over at least two prompts, by metric."""
        return dict(self._compute())

    def _compute(self) -> Iterator[tuple[str, float]]:
        for name, parts in self._sums.items():
            sum_G, count_G = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            prompts, total = int((count_G > 0).sum()), count_G.sum()
            if prompts < 2:
                continue
            rest_G = sum_G - count_G * (sum_G.sum() / total)
            yield name, float((rest_G.square().sum() * prompts / (prompts - 1)).sqrt() / total)


def named_metrics(keys: Iterable[str]) -> list[str]:
    """Return the metrics of named rewards, see `sequence_stats`."""
    return [f"{key}/{what}" for key in sorted(keys) for what in ("mean", "std")]


def _sequence_values(batch: SequenceSample) -> dict[str, Tensor]:
    """Return the values [S] whose means are metrics, for the keys that the batch contains.

    The unit is the episode: its first sequence has the value, and further ones, which agents make, have NaN. Every
    response of a sampler is an episode.

    - `reward`: total reward, NaN for an episode without a reward
    - `rewards/<name>/mean`: a named reward, NaN for an episode without it
    - `missing_rewards`: 1 for an episode without a reward
    - `response_tokens`: tokens outside the prompt mask, of all sequences, also of episodes without a reward
    - `truncated_fraction`: 1 for an episode with a truncated sequence
    - `turns`: policy turns of a multi-turn episode
    - `failures/<kind>`: 1 for an episode in which the environment or agent failed in this way (`EpisodeFailure`)
    """
    values: dict[str, Tensor] = {}
    if "rewards" in batch:
        rewards_S = total_rewards(batch)
        present_S = rewards_S.isfinite()
        values["reward"] = torch.where(present_S, rewards_S, torch.nan)
        values["missing_rewards"] = (~present_S).float()
    if "input_ids" in batch:
        for key, named_S in named_rewards(batch).items():
            values[f"{key}/mean"] = torch.where(named_S.isfinite(), named_S, torch.nan)
    if "prompt_mask" in batch:
        response_S = segment_sum((~batch["prompt_mask"]).float(), batch.cu_seqlens())
        values["response_tokens"] = _of_episodes(batch, response_S)
    if "truncated" in batch:
        values["truncated_fraction"] = _of_episodes(batch, batch["truncated"].float()).clamp(max=1)
    if "turns" in batch:
        values["turns"] = _of_episodes(batch, batch["turns"].float())
    if "failure" in batch:
        values |= {name: (batch["failure"] == i).float() for i, name in enumerate(FAILURES, 1)}
    return {
        name: torch.where(batch.once_per_episode(torch.ones_like(x_S, dtype=torch.bool)), x_S, torch.nan)
        for name, x_S in values.items()
    }


def check_pass_at(pass_at: Iterable[int], n: int, setting: str) -> None:
    """Check the values of k for pass@k with `n` responses to a prompt, which `setting` determines.

    Raises:
        SettingsError: a k is above `n`.
    """
    for k in pass_at:
        if k > n:
            raise SettingsError(f"pass_at=[{k}]: needs at least {k} responses per prompt. Set {setting}={k}")


def group_metrics(n: int, pass_at: Iterable[int]) -> list[str]:
    """Return the metrics that need several responses per prompt."""
    passes = [f"pass@{k}" for k in pass_at]
    return [f"mean@{n}", *passes] if n > 1 or passes else []


def group_values(
    judged: SequenceSample, n: int, pass_at: Iterable[int], success: float, decisive_S: Tensor | None = None
) -> dict[str, Tensor]:
    """Return pass@k and the mean of the `n` episodes [G] of each prompt, NaN for prompts without a value.

    Args:
        judged: the episodes with their rewards. Every response of a sampler is one.
        n: episodes per prompt.
        pass_at: values of k.
        success: minimum of a success.
        decisive_S: [S] rewards that decide about success; None: the total rewards.
    """
    pass_at = list(pass_at)
    names = group_metrics(n, pass_at)
    if not names:
        return {}
    group_S, rewards_S = judged.group_index(), episode_rewards(judged)
    decisive_S = rewards_S if decisive_S is None else decisive_S
    present_S = rewards_S.isfinite() & decisive_S.isfinite()

    def per_prompt(x_S: Tensor) -> Tensor:
        return torch.zeros(len(judged), dtype=torch.float64).index_add_(0, group_S, x_S.double())

    n_G = per_prompt(present_S)
    correct_G = per_prompt(present_S & (decisive_S >= success))
    # `where`, because a missing reward is NaN and NaN * 0 is NaN; a prompt without any reward is 0 / 0 = NaN again
    mean_G = per_prompt(torch.where(present_S, rewards_S, 0)) / n_G
    values = [mean_G, *(pass_at_k(n_G.long(), correct_G.long(), k) for k in pass_at)]
    return dict(zip(names, values, strict=True))


def _of_episodes(batch: SequenceSample, x_S: Tensor) -> Tensor:
    """Return [S] the sum of `x_S` over the sequences of each one's episode."""
    if EPISODE not in batch:
        return x_S
    index_S = batch.episode_index()
    return torch.zeros_like(x_S).index_add(0, index_S, x_S)[index_S]


def sequence_stats(batch: SequenceSample) -> Stats:
    """Return metrics of sampled sequences: the means of `_sequence_values` over the episodes with a value.

    `rewards/<name>/std` is the population standard deviation of a named reward.
    """
    values = _sequence_values(batch)
    stats: Stats = {name: _mean(x_S) for name, x_S in values.items()}
    if "input_ids" in batch:
        for key in named_rewards(batch):
            named_S = values[f"{key}/mean"]
            stats[f"{key}/std"] = masked_std(named_S, named_S.isfinite())
    return stats


def _mean(x: Tensor) -> Mean:
    return masked_mean(x, x.isfinite())

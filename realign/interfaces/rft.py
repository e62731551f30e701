"""RFT: fine-tune on a growing pool of samples, above a rising threshold (trlX's `accelerate_rft_trainer.py`).

Every step adds its samples to the pool, then runs `n_improve_steps` improvements on the prompts of its batch. An
improvement selects the distinct responses above a percentile of their prompt's rewards, and maximizes their likelihood.
The percentile rises from one improvement to the next. Sources: ReST, arXiv:2308.08998 (grow and improve);
arXiv:2308.01825 (distinct responses). The loss, the excluded responses and the keys are those of RAFT.

With all prompts in one batch, a step equals one iteration of trlX: one growth and its improvements. Differences: the
last percentile is `end_percentile`, while trlX stops below it. A response sampled twice counts once in the percentile.
Prompts are not learned. Rewards with few distinct values are treated differently (`above_percentile`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from realign.api import (
    GenerationConfig,
    Keys,
    Mean,
    MicroBatchSpec,
    Model,
    Plan,
    SequenceSample,
    Stats,
    Sum,
    masked_mean,
    merge_stats,
)
from realign.errors import SettingsError
from realign.interfaces.raft import (
    dataflow,
    describe_selection,
    fit,
    sample_responses,
    selection_keys,
    selection_plan,
    trainable,
)
from realign.interfaces.sft import SFTInterface
from realign.settings import Count, Finite, Fraction

Tokens: TypeAlias = tuple[int, ...]

__all__ = ["RFTActorInterface", "dataflow"]


@dataclass
class RFTActorInterface(SFTInterface):
    """The policy of RFT: likelihood of pooled responses above a percentile of their prompt's rewards."""

    reads_images: ClassVar[bool] = False

    generation: GenerationConfig = field(default_factory=lambda: GenerationConfig(n=32))
    """How to sample responses; all settings are allowed. A step adds at most `generation.n` responses per prompt to the
    pool."""
    epochs: Count = 1
    """How often to train on the selected responses in each improvement."""
    n_improve_steps: Count = 4
    """Selections per step, each with a threshold of its own."""
    start_percentile: Fraction = 0.7
    """First threshold: a response must reach this percentile of its prompt's pooled rewards, as a fraction."""
    end_percentile: Fraction = 0.95
    """Last threshold, as a fraction; it rises linearly in between."""
    min_reward: Finite | None = None
    """Never train on responses with a smaller reward; null sets no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start_percentile > self.end_percentile:
            raise SettingsError(
                f"start_percentile={self.start_percentile:g}: must be at most end_percentile={self.end_percentile:g}"
            )
        self.pool = Pool()

    @override
    def keys(self, method: str) -> Keys:
        return selection_keys(method)

    @override
    def plan(self) -> Plan:
        return selection_plan(self.generation, self.epochs * self.n_improve_steps, self.n_minibatches)

    @override
    def headline(self) -> tuple[str, ...]:
        return ("reward", "selected_reward", "threshold", *super().headline())

    def generate(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Sample `generation.n` responses per prompt."""
        return sample_responses(model, data, self.generation)

    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> Stats:
        """Add responses to the pool, then run `n_improve_steps` improvements on the pooled responses to this batch."""
        valid_S = trainable(data)
        n_new = self.pool.add(data, valid_S)
        pooled = self.pool.take(data)
        rng = np.random.default_rng(model.call_seed("minibatches"))
        stats: list[Stats] = [
            {
                "pool_size": Sum(torch.tensor(len(self.pool))),
                "new_fraction": Mean(torch.tensor(float(n_new)), valid_S.sum()),
            }
        ]
        for percentile in self.percentiles() if len(pooled) else ():
            threshold_S, chosen_S = above_percentile(pooled, percentile)
            if self.min_reward is not None:
                chosen_S = chosen_S & (pooled["rewards"] >= self.min_reward)
            # All responses to a prompt have its threshold; the metric counts it once, at the first of them.
            first_S = torch.cat([chosen_S.new_ones(1), pooled.group_index().diff() > 0])
            stats.append(
                {
                    "threshold": masked_mean(threshold_S, first_S),
                    "selected_reward": masked_mean(pooled["rewards"], chosen_S),
                    "selected_fraction": masked_mean(chosen_S, torch.ones_like(chosen_S)),
                }
            )
            chosen = pooled.take_sequences(np.flatnonzero(chosen_S.cpu().numpy()))
            stats.extend(fit(self, model, chosen, mb_spec, self.epochs, rng))
        return merge_stats(stats)

    def percentiles(self) -> list[float]:
        """Return the percentile of each improvement, as a fraction."""
        return np.linspace(self.start_percentile, self.end_percentile, self.n_improve_steps).tolist()

    def state_dict(self) -> dict[str, Any]:
        """Return the pool, as lists."""
        return {"pool": self.pool.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the pool."""
        self.pool.load_state_dict(state["pool"])

    def describe(self, batch_prompts: int) -> dict[str, str]:
        """Return the rows of the launch table."""
        percentiles = ", ".join(f"{100 * p:g}" for p in self.percentiles())
        kept = f"pooled responses above percentile {percentiles} of their prompt"
        kept += "" if self.min_reward is None else f", with a reward of at least {self.min_reward:g}"
        return describe_selection(self, kept)


class Pool:
    """Distinct scored responses by prompt. The keys are token ids, so a prompt is recognized in every epoch."""

    def __init__(self) -> None:
        self._prompts: dict[Tokens, dict[Tokens, tuple[Tokens, float]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._prompts.values()))

    def add(self, data: SequenceSample, valid_S: Tensor) -> int:
        """Add the responses of `valid_S`; a known response gets its new reward. Returns the number of new responses."""
        before, prompts = len(self), prompts_of(data)
        columns = (data.group_index(), valid_S, data["rewards"])
        per_sequence = zip(*(x.tolist() for x in columns), strict=True)
        tokens = zip(data.sequences("input_ids"), data.sequences("loss_mask"), strict=True)
        for (owner, valid, reward), (ids, mask) in zip(per_sequence, tokens, strict=True):
            if valid:
                responses = self._prompts.setdefault(prompts[owner], {})
                responses[tuple(ids.tolist())] = (tuple(mask.int().tolist()), reward)
        return len(self) - before

    def take(self, data: SequenceSample) -> SequenceSample:
        """Return `input_ids`, `loss_mask` and `rewards` of the pooled responses to `data`, each prompt once."""
        id_of: dict[Tokens, Hashable] = {}
        for i, prompt in zip(data.ids, prompts_of(data), strict=True):
            if prompt in self._prompts:
                id_of.setdefault(prompt, i)
        groups = [self._prompts[prompt] for prompt in id_of]
        sample = SequenceSample.from_sequences(
            list(id_of.values()),
            {
                "input_ids": [[torch.tensor(ids) for ids in group] for group in groups],
                "loss_mask": [[torch.tensor(mask, dtype=torch.bool) for mask, _ in group.values()] for group in groups],
            },
        )
        rewards = [reward for group in groups for _, reward in group.values()]
        sample = sample.with_sequences(rewards=torch.tensor(rewards, dtype=data["rewards"].dtype))
        return sample.to(data["input_ids"].device)

    def state_dict(self) -> dict[str, Any]:
        """Return every response, as lists of integers and its reward."""
        return {
            "responses": [
                [list(prompt), list(ids), list(mask), reward]
                for prompt, responses in self._prompts.items()
                for ids, (mask, reward) in responses.items()
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, replacing the current pool.

        Raises:
            ValueError: a response is not three lists of integers and a reward.
        """
        self._prompts = {}
        for prompt, ids, mask, reward in state["responses"]:
            if not all(type(token) is int for tokens in (prompt, ids, mask) for token in tokens):
                raise ValueError("responses: expected token ids and masks as integers")
            if len(ids) != len(mask):
                raise ValueError(f"responses: {len(ids)} token ids, but a mask of {len(mask)}")
            self._prompts.setdefault(tuple(prompt), {})[tuple(ids)] = (tuple(mask), float(reward))


def prompts_of(data: SequenceSample) -> list[Tokens]:
    """Return the prompt of each id: the leading prompt tokens of its first sequence."""
    firsts = data.lengths["input_ids"].sequence_starts[:-1].tolist()
    ids, given = data.sequences("input_ids"), data.sequences("prompt_mask")
    return [tuple(ids[s][given[s].int().cumprod(0).bool()].tolist()) for s in firsts]


def above_percentile(pooled: SequenceSample, percentile: float) -> tuple[Tensor, Tensor]:
    """Return the threshold of each response's prompt, and the responses that reach it.

    The threshold is the linearly interpolated percentile of the prompt's rewards. Since rewards often have few distinct
    values, a response must also be better than the worst one of its prompt. If all are equal, none is selected.

    Args:
        pooled: batch with `rewards` [S], all finite.
        percentile: percentile, as a fraction.

    Returns:
        [S] thresholds, and [S] bool.
    """
    rewards_S = pooled["rewards"].double().cpu().numpy()
    groups = np.split(rewards_S, pooled.lengths["input_ids"].sequence_starts[1:-1])
    # Rounding in the interpolation must not raise the threshold above the best reward.
    threshold = [np.full(len(r), min(np.quantile(r, percentile), r.max())) for r in groups]
    worst = [np.full(len(r), r.min()) for r in groups]
    threshold_S = np.concatenate(threshold)
    chosen_S = (rewards_S >= threshold_S) & (rewards_S > np.concatenate(worst))
    device = pooled["rewards"].device
    return torch.from_numpy(threshold_S).to(device), torch.from_numpy(chosen_S).to(device)

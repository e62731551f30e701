"""`Refill`: dynamic sampling in asynchronous rollout, which replaces each prompt that fails the filter by a new one.

No group that passed is dropped. With synchronous rollout, surplus groups would be off-policy in the next step.
"""

from __future__ import annotations

from realign.api import Mean, SequenceSample, masked_mean, merge_stats, stat_values
from realign.api.rewards import total_rewards
from realign.errors import RunError
from realign.runtime.experiment import Experiment
from realign.runtime.rollout.staleness import Staleness


class Refill:
    """Filters scored prompts, and counts them between steps."""

    def __init__(self, experiment: Experiment) -> None:
        assert experiment.dynamic_sampling is not None
        self._sampling = experiment.dynamic_sampling
        self._most = self._sampling.max_batches * experiment.prompts_at_once
        self._batch_prompts = experiment.batch_prompts
        self.begun = 0
        """Prompts started since the last step; at most the prompts of `max_batches` batches."""
        self._sampled = self._passed = 0
        self._rewards: list[Mean] = []

    def may_sample(self) -> bool:
        """Return whether one more prompt may start before the next step."""
        return self.begun < self._most

    def chosen(self, judged: SequenceSample) -> set[int]:
        """Return the indices of the prompts that pass the filter."""
        passed = set(self._sampling.chosen(judged))
        rewards_S = total_rewards(judged)
        self._rewards.append(masked_mean(rewards_S, rewards_S.isfinite()))
        self._sampled += len(judged)
        self._passed += len(passed)
        return passed

    def short_batch(self, staleness: Staleness) -> list[int] | None:
        """Return an incomplete batch once `max_batches` batches were sampled and scored for the step; otherwise None.

        Raises:
            RunError: no prompt passed the filter.
        """
        if self.may_sample() or len(staleness.ready) < len(staleness.begun):
            return None
        if not staleness.ready:
            raise RunError(self._sampling.nothing(self._sampled, self._sampling.max_batches, self._mean_reward()))
        return list(staleness.begun)[: self._batch_prompts]

    def metrics(self, batch: int) -> dict[str, float]:
        """Return metrics of the prompts scored since the last step, and reset the counts.

        Args:
            batch: number of prompts that the step trains on.
        """
        values = {
            "sampled_prompts": float(self._sampled),
            "missing_prompts": float(self._batch_prompts - batch),
        }
        if self._sampled:
            values["accepted_fraction"] = self._passed / self._sampled
        if (reward := self._mean_reward()) is not None:
            values["sampled_reward"] = reward
        self.begun = self._sampled = self._passed = 0
        self._rewards.clear()
        return {f"dynamic_sampling/{name}": value for name, value in values.items()}

    def _mean_reward(self) -> float | None:
        return stat_values(merge_stats({"reward": mean} for mean in self._rewards)).get("reward")

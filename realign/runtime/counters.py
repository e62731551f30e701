"""`Counters`: what a run counts over all of its steps; part of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from realign.errors import RunError


@dataclass
class Counters:
    """Counters of the steps so far."""

    optimizer_steps: float = 0.0
    """Optimizer steps of all models."""
    rewards_seen: int = 0
    """Responses with a reward."""
    reward_ema: float | None = None
    """Latest value of the metric `reward_ema`."""
    ratio_checked: set[str] = field(default_factory=set)
    """Training RPCs whose first log-probs were compared with the sampler's."""

    def state_dict(self) -> dict[str, Any]:
        """Return the counters as plain values."""
        return vars(self) | {"ratio_checked": sorted(self.ratio_checked)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Counters:
        """Restore counters from a `state_dict`."""
        return cls(**{**state, "ratio_checked": set(state["ratio_checked"])})

    def check_progress(self, steps: int, *, rewarded: bool) -> None:
        """Check that a run of `steps` steps made at least one optimizer step.

        Args:
            steps: number of steps of the run.
            rewarded: whether the graph writes rewards.

        Raises:
            RunError: no optimizer step was made.
        """
        if self.optimizer_steps:
            return
        why = "Every gradient was zero or non-finite. Check whether all rewards are equal."
        if rewarded and self.rewards_seen == 0:
            why = "Every reward was missing. Check whether the reward function returns None or fails."
        raise RunError(
            f"steps={steps}: the run made no optimizer step. {why} The metrics *_steps in metrics.jsonl count the "
            "skipped steps."
        )


__all__ = ["Counters"]

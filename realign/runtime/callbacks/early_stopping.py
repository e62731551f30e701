"""`EarlyStopping`: stop a run whose metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from realign.api.callback import Callback, CallbackResult, EvaluationEvent, StepEvent
from realign.settings import Count, NonNegative

EVALUATED = "eval/"


class Goal(StrEnum):
    """Direction in which a metric improves."""

    max = "max"
    """Larger values are better."""
    min = "min"
    """Smaller values are better."""


@dataclass
class EarlyStopping(Callback):
    """Stop the run when a metric has not improved for `patience` measurements."""

    metric: str = "eval/reward"
    """Metric to watch. An evaluation metric (`eval/...`) is measured at every evaluation, any other at every step."""
    patience: Count = 3
    """Stop after this many measurements in a row without an improvement."""
    mode: Goal = Goal.max
    """max: larger values are better. min: smaller values are better."""
    min_delta: NonNegative = 0.0
    """Changes smaller than this don't count as an improvement."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.best: float | None = None
        """Best value so far; None before the first measurement."""
        self.best_step = 0
        """Step of the best value."""
        self.waited = 0
        """Measurements since the best value."""

    def reads(self) -> Sequence[str]:
        """Return the watched metric."""
        return (self.metric,)

    def on_evaluation(self, event: EvaluationEvent) -> CallbackResult | None:
        """Compare an evaluation metric with the best value."""
        return self._compared(event.step, event.metrics) if self.metric.startswith(EVALUATED) else None

    def on_step(self, event: StepEvent) -> CallbackResult | None:
        """Compare a metric of the step with the best value."""
        return None if self.metric.startswith(EVALUATED) else self._compared(event.step, event.metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, its step, and the number of measurements since."""
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.best, self.best_step, self.waited = state["best"], state["best_step"], state["waited"]

    def _compared(self, step: int, metrics: Mapping[str, float]) -> CallbackResult | None:
        value = metrics.get(self.metric)
        if value is None:  # some algorithms report some metrics only in some steps
            return None
        if self._improved(value):
            self.best, self.best_step, self.waited = value, step, 0
            return None
        self.waited += 1
        if self.waited < self.patience:
            return None
        best = "never a number" if self.best is None else f"best {self.best:.4g} at step {self.best_step}"
        return CallbackResult(stop=f"{self.metric} did not improve in {self.waited} measurements ({best})")

    def _improved(self, value: float) -> bool:
        # no later value is larger or smaller than NaN, so a first NaN would stay the best for ever
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        return value > self.best + self.min_delta if self.mode is Goal.max else value < self.best - self.min_delta


__all__ = ["EarlyStopping", "Goal"]

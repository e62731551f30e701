"""`EarlyStopping`: stop a run whose metric no longer improves, or is out of bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from realign.api.callback import Callback, CallbackResult, EvaluationEvent, StepEvent
from realign.errors import NoEffectError
from realign.settings import Count, Finite, NonNegative

_EVALUATED = "eval/"


class Goal(StrEnum):
    """Direction in which a metric improves."""

    max = "max"
    """Larger values are better."""
    min = "min"
    """Smaller values are better."""


@dataclass
class EarlyStopping(Callback):
    """Stop the run when a metric has not improved for `patience` measurements, or was beyond a bound for as many."""

    metric: str = "eval/reward"
    """Metric to watch. An evaluation metric (`eval/...`) is measured at every evaluation, any other at every step."""
    patience: Count = 3
    """Stop after this many measurements in a row without an improvement."""
    mode: Goal = Goal.max
    """max: larger values are better. min: smaller values are better."""
    min_delta: NonNegative = 0.0
    """Changes smaller than this don't count as an improvement."""
    bound: Finite | None = None
    """Stop when the metric is above this for `patience` measurements in a row (mode=max: below), whether or not it
    improves. With metric=ref_kl and mode=min, a policy that is too far from the reference ends the run. null: stop when
    it doesn't improve."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bound is not None and self.min_delta:
            reason = f"with bound={self.bound:g}, which needs no improvement."
            raise NoEffectError(type(self), "min_delta", f"{self.min_delta:g}", reason)
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
        return self._compare(event.step, event.metrics) if self.metric.startswith(_EVALUATED) else None

    def on_step(self, event: StepEvent) -> CallbackResult | None:
        """Compare a metric of the step with the best value."""
        return None if self.metric.startswith(_EVALUATED) else self._compare(event.step, event.metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, its step, and the number of measurements since."""
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.best, self.best_step, self.waited = state["best"], state["best_step"], state["waited"]

    def _compare(self, step: int, metrics: Mapping[str, float]) -> CallbackResult | None:
        value = metrics.get(self.metric)
        if value is None:  # some algorithms report some metrics only in some steps
            return None
        improved = self._is_better(value)
        if improved:
            self.best, self.best_step = value, step
        good = improved if self.bound is None else self._within(value, self.bound)
        self.waited = 0 if good else self.waited + 1
        if self.waited < self.patience:
            return None
        if self.bound is not None:
            side = "below" if self.mode is Goal.max else "above"
            times = "once" if self.waited == 1 else f"{self.waited} times in a row"
            return CallbackResult(stop=f"{self.metric} was {side} {self.bound:g} {times} (last {value:.4g})")
        best = "never a number" if self.best is None else f"best {self.best:.4g} at step {self.best_step}"
        return CallbackResult(stop=f"{self.metric} did not improve in {self.waited} measurements ({best})")

    def _within(self, value: float, bound: float) -> bool:
        return value >= bound if self.mode is Goal.max else value <= bound  # NaN is not

    def _is_better(self, value: float) -> bool:
        # no later value is larger or smaller than NaN, so a first NaN would stay the best for ever
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        return value > self.best + self.min_delta if self.mode is Goal.max else value < self.best - self.min_delta

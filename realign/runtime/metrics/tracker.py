"""Metric sinks: one `log` call per step updates the JSONL file, the live display and other trackers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Protocol


class Tracker(Protocol):
    """A sink for the metrics of each step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of `step` (0: before training)."""
        ...

    def close(self) -> None:
        """Flush the metrics and release resources."""
        ...


class Forgiving:
    """A tracker wrapper that turns failures into warnings, so that they never stop a run.

    Args:
        name: Name of the tracker, for messages.
        tracker: Wrapped tracker.
    """

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name = name
        self._tracker = tracker
        self._missed: list[int] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Forward the metrics to the tracker. Warn about the first failure and count later ones."""
        try:
            self._tracker.log(step, metrics)
        except Exception as error:
            self._missed.append(step)
            if len(self._missed) == 1:
                what = f"Tracker {self.name!r} failed at step {step} ({type(error).__name__}: {error})"
                warnings.warn(f"{what}. Training continues; metrics.jsonl contains this step.", stacklevel=2)

    def close(self) -> None:
        """Close the tracker, and warn about the number of steps that it missed."""
        try:
            self._tracker.close()
        except Exception as error:
            warnings.warn(f"Tracker {self.name!r} could not be closed ({type(error).__name__}: {error}).", stacklevel=2)
        if self._missed:
            first, last = self._missed[0], self._missed[-1]
            n = len(self._missed)
            warnings.warn(f"Tracker {self.name!r} missed {n} steps, from {first} to {last}.", stacklevel=2)

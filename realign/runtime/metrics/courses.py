"""The course of metrics over a run: first, best and last values."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from realign.runtime.display import EVALUATION, GENERAL, first_metrics, limited

LARGER = ("reward", "accuracy", "margin", "pass", "mean@", "score")
"""Parts of the names of metrics that improve when they rise."""
SMALLER = ("loss", "nll", "perplexity")
"""Parts of the names of metrics that improve when they fall."""
NEITHER = ("constant_reward",)
"""Ends of the names of metrics that only stand beside another one."""
MOST = 8
"""Metrics in a summary."""
DETAILS = ("/missing_rewards", "/std", "/most_common_fraction")
"""Ends of the names of held-out metrics that only metrics.jsonl and the charts contain."""


@dataclass(frozen=True)
class Course:
    """The course of one metric over a run."""

    name: str
    """Name of the metric."""
    first: float
    """Value at `first_step`."""
    first_step: int
    """First step that reported the metric."""
    last: float
    """Value at `last_step`."""
    last_step: int
    """Last step that reported the metric."""
    best: float | None
    """Best value; None if it is unknown whether larger or smaller values are better."""
    best_step: int | None
    """Step of the best value."""


def courses(
    history: Sequence[Mapping[str, float]], shown: Sequence[str], better: Mapping[str, bool] | None = None
) -> tuple[Course, ...]:
    """Return the course of the headline metrics: evaluations first, then metrics of training.

    Args:
        history: Records of all steps.
        shown: Headline metrics, most important first.
        better: Metrics of which it is known whether larger values are better.
    """
    reported = dict.fromkeys(name for record in history for name in record if name != "step")
    known = {name: larger_is_better(name, better or {}) for name in reported}
    names = [name for name in shown if name in reported and name not in GENERAL]
    evaluated = held_out(reported, shown)
    evaluated.sort(key=lambda name: (known[name] is None, name not in names))  # stable: otherwise as reported
    others = [name for name in names or first_metrics(reported) if not name.startswith(EVALUATION)]
    evaluated = evaluated[: MOST - 2]
    order = [*evaluated, *limited(others, MOST - len(evaluated))]
    points = {name: [(int(record["step"]), record[name]) for record in history if name in record] for name in order}
    return tuple(course(name, points[name], known[name]) for name in order)


def larger_is_better(name: str, known: Mapping[str, bool]) -> bool | None:
    """Return whether a metric improves when it rises; None if that is unknown.

    Args:
        name: Name of the metric.
        known: Metrics of which it is known.
    """
    if name in known:
        return known[name]
    if not name.startswith(EVALUATION):
        return None  # a single training batch is too noisy for a best value
    if name.endswith(NEITHER):
        return None
    if any(part in name for part in SMALLER):
        return False
    return True if any(part in name for part in LARGER) else None


def held_out(reported: Collection[str], shown: Collection[str] = ()) -> list[str]:
    """Return the metrics of evaluations without their `DETAILS`, and without a loss that repeats the likelihood.

    Args:
        reported: names of all metrics.
        shown: headline metrics. If they contain `nll` without `loss`, both are the same number.
    """
    repeats = ("/loss",) if "nll" in shown and "loss" not in shown else ()
    return [name for name in reported if name.startswith(EVALUATION) and not name.endswith((*DETAILS, *repeats))]


def number(value: float) -> str:
    """Return a metric for tables."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def course(name: str, points: Sequence[tuple[int, float]], larger: bool | None) -> Course:
    """Return the course of one metric.

    Args:
        name: Name of the metric.
        points: Steps and values, at least one.
        larger: Whether larger values are better; None if that is unknown.
    """
    finite = [point for point in points if math.isfinite(point[1])]
    best: tuple[int, float] | None = None
    if larger is not None and finite:
        best = (max if larger else min)(finite, key=lambda point: point[1])
    (first_step, first), (last_step, last) = points[0], points[-1]
    found = (None, None) if best is None else (best[1], best[0])
    return Course(name, first, first_step, last, last_step, *found)


__all__ = ["Course", "course", "courses", "held_out", "larger_is_better", "number"]

"""Select the metrics that a run shows: on the progress line, as charts, and in its summary."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from realign.api import DataflowGraph, ModelInterface, Panel
from realign.api.rewards import NAMED

_GENERAL = (
    "response_tokens",
    "grad_norm",
    "lr",
    "rollout_tokens_per_s",
    "train_tokens_per_s",
    "step_s",
)
"""Metrics of any run, shown after those that the interfaces declare."""
_TIMES = ("time/", "step_s", "rollout_tokens_per_s", "train_tokens_per_s", "train_tflop_per_s")
"""Name prefixes of metrics that measure speed."""
EVALUATION = "eval/"
HELD_OUT = "held out"


def headline(
    graph: DataflowGraph, interfaces: Mapping[str, ModelInterface], lead: str, sets: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the metrics of the progress line, most important first, each followed by its held-out values.

    `sets` are the names of the evaluations (`Experiment.evaluations`).

    The order is: metrics of the leading role, metrics of other trained roles with their prefix, general metrics. Named
    rewards follow the metric `reward`. Empty if no trained role declares any metric.
    """
    names = [f"{prefix}{name}" for prefix, own in _trained_roles(graph, interfaces, lead) for name in own.headline()]
    if not names:
        return ()
    place = names.index("reward") + 1 if "reward" in names else len(names)
    names[place:place] = _named_means(graph)
    prefixes = ["", EVALUATION, *(f"{EVALUATION}{name}/" for name in sets)]
    return tuple(dict.fromkeys(f"{prefix}{name}" for name in (*names, *_GENERAL) for prefix in prefixes))


def targets(graph: DataflowGraph, interfaces: Mapping[str, ModelInterface], lead: str) -> dict[str, float]:
    """Return the values that the settings of the trained roles ask for, by metric."""
    trained = _trained_roles(graph, interfaces, lead)
    return {f"{prefix}{name}": value for prefix, own in trained for name, value in own.targets().items()}


def _named_means(graph: DataflowGraph) -> list[str]:
    """Return the metrics of the named rewards (`rewards/<name>/mean`) that the RPCs of a graph write."""
    return sorted(f"{key}/mean" for key in graph.producers if key.startswith(NAMED))


def limit_metrics(names: Sequence[str], most: int) -> list[str]:
    """Return the first `most` metrics of a headline, in which each trained role has at least one place."""
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(name.partition("/")[0] if "/" in name and not name.startswith(NAMED) else "", name)
    # each role first, or a leading role with a long headline would hide the others
    selected = set(first.values())
    for name in names:
        if len(selected) < most:
            selected.add(name)
    return [name for name in names if name in selected]


def first_metrics(reported: Iterable[str], most: int = 12) -> list[str]:
    """Return the metrics to show for interfaces that declare none: the first reported ones except speed."""
    names = list(reported)
    return [name for name in names if not name.startswith(_TIMES)][:most] or names[:most]


def panels(
    graph: DataflowGraph,
    interfaces: Mapping[str, ModelInterface],
    lead: str,
    reported: Iterable[str] = (),
    added: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Panel, ...]:
    """Return the charts of the learning curves: general ones and those of all trained roles.

    An interface without charts gets one chart for each metric of its headline. Without a headline, it gets charts for
    the first metrics in `reported`. Charts with the same title are merged. Each metric in `added`, which maps the
    metrics of callbacks to the names of the callbacks, gets its own chart.
    """
    undeclared = [
        name for name in reported if not name.startswith(EVALUATION) and name not in _GENERAL and name not in added
    ]
    declared = [Panel("reward per response", {"reward": "training batch (sampled)"})]
    if means := _named_means(graph):
        labels = {name: name.removeprefix(NAMED).removesuffix("/mean") for name in means}
        declared.append(Panel("reward of each function", labels))
    for prefix, interface in _trained_roles(graph, interfaces, lead):
        names = interface.headline() or (() if prefix else first_metrics(undeclared, most=6))
        own = interface.panels() or tuple(Panel(name, {name: "training batch"}) for name in names)
        declared += [
            Panel(panel.title, {f"{prefix}{name}": label for name, label in panel.metrics.items()}) for panel in own
        ]
    declared += [
        Panel("response length (tokens)", {"response_tokens": "training batch"}),
        Panel("gradient norm", {"grad_norm": "before clipping"}),
    ]
    declared += [Panel(name, {name: f"callbacks.{owner}"}) for name, owner in added.items()]
    shown: set[str] = set()
    merged: dict[str, dict[str, str]] = {}
    for panel in declared:
        new = {name: label for name, label in panel.metrics.items() if name not in shown}
        shown |= new.keys()
        if new:
            merged.setdefault(panel.title, {}).update(new)
    return tuple(Panel(title, metrics) for title, metrics in merged.items())


def with_held_out(charts: Sequence[Panel], reported: Iterable[str]) -> tuple[Panel, ...]:
    """Return the charts with the reported held-out values added.

    A held-out value is added to the chart of its training metric. The remaining ones share one extra chart, except
    `mean@n`, which repeats the mean reward.
    """
    names = [name for name in dict.fromkeys(reported) if name.startswith(EVALUATION)]
    shown = {name for panel in charts for name in panel.metrics}
    extended = []
    for panel in charts:
        metrics = dict(panel.metrics)
        for name, label in panel.metrics.items():
            for held_out in names:
                found_in = _set_of(held_out, name)
                if found_in is not None and held_out not in shown:
                    where = f"{HELD_OUT}: {found_in}" if found_in else HELD_OUT
                    metrics[held_out] = where if len(panel.metrics) == 1 else f"{label}, {where}"
        extended.append(Panel(panel.title, metrics))
    shown |= {name for panel in extended for name in panel.metrics}
    others = {
        name: name.removeprefix(EVALUATION)
        for name in names
        if name not in shown and not name.rpartition("/")[2].startswith("mean@")
    }
    return (*extended, Panel("other held-out metrics", others)) if others else tuple(extended)


def _set_of(held_out: str, name: str) -> str | None:
    """Return the evaluation set of which `held_out` is the metric `name` ("" if unnamed); None for another metric."""
    if not held_out.endswith(f"/{name}"):
        return None
    set_name = held_out.removeprefix(EVALUATION).removesuffix(name).removesuffix("/")
    return None if "/" in set_name else set_name


def _trained_roles(
    graph: DataflowGraph, interfaces: Mapping[str, ModelInterface], lead: str
) -> list[tuple[str, ModelInterface]]:
    """Return the metric prefix and the interface of each trained role, the leading role first."""
    roles = dict.fromkeys(rpc.model for rpc in graph.rpcs if rpc.method == "train_step")
    ordered = sorted(roles, key=lambda role: role != lead)
    return [("" if role == lead else f"{role}/", interfaces[role]) for role in ordered]


_LARGER = ("reward", "accuracy", "margin", "pass", "mean@", "score")
"""Parts of the names of metrics that improve when they rise."""
SMALLER = ("loss", "nll", "perplexity")
"""Parts of the names of metrics that improve when they fall."""
_NEITHER = ("constant_reward",)
"""Ends of the names of metrics that only stand beside another one."""
_MOST_SUMMARIZED = 8
"""Metrics in a summary."""
_DETAILS = ("/missing_rewards", "/std", "/most_common_fraction")
"""Ends of the names of held-out metrics that only metrics.jsonl and the charts contain."""


@dataclass(frozen=True)
class MetricSummary:
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


def metric_summaries(
    history: Sequence[Mapping[str, float]], shown: Sequence[str], better: Mapping[str, bool] | None = None
) -> tuple[MetricSummary, ...]:
    """Return the course of the headline metrics: evaluations first, then metrics of training.

    Args:
        history: Records of all steps.
        shown: Headline metrics, most important first.
        better: Metrics of which it is known whether larger values are better.
    """
    reported = dict.fromkeys(name for record in history for name in record if name != "step")
    known = {name: larger_is_better(name, better or {}) for name in reported}
    names = [name for name in shown if name in reported and name not in _GENERAL]
    evaluated = held_out_metrics(reported, shown)
    evaluated.sort(key=lambda name: (known[name] is None, name not in names))  # stable: otherwise as reported
    others = [name for name in names or first_metrics(reported) if not name.startswith(EVALUATION)]
    # leaves room for two metrics of training, however many evaluation sets there are
    evaluated = evaluated[: _MOST_SUMMARIZED - 2]
    order = [*evaluated, *limit_metrics(others, _MOST_SUMMARIZED - len(evaluated))]
    points = {name: [(int(record["step"]), record[name]) for record in history if name in record] for name in order}
    return tuple(
        metric_summary(name, points[name], known[name]) for name in order if not is_noise(x for _, x in points[name])
    )


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
    if name.endswith(_NEITHER):
        return None
    if any(part in name for part in SMALLER):
        return False
    return True if any(part in name for part in _LARGER) else None


def held_out_metrics(reported: Collection[str], shown: Collection[str] = ()) -> list[str]:
    """Return the metrics of evaluations without their `_DETAILS`, and without a loss that repeats the likelihood.

    Args:
        reported: names of all metrics.
        shown: headline metrics. If they contain `nll` without `loss`, both are the same number.
    """
    repeats = ("/loss",) if "nll" in shown and "loss" not in shown else ()
    return [name for name in reported if name.startswith(EVALUATION) and not name.endswith((*_DETAILS, *repeats))]


_NOISE = 1e-9
"""Absolute value below which a shown metric is 0."""


def is_noise(values: Iterable[float]) -> bool:
    """Return whether a metric is nothing but rounding noise, which no chart and no table shows. Zeros say something."""
    sizes = [abs(value) for value in values]
    return any(sizes) and all(size < _NOISE for size in sizes)


def number(value: float) -> str:
    """Return a metric for tables. Rounding noise, such as the KL of a policy to itself, is 0."""
    if abs(value) < _NOISE:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def metric_summary(name: str, points: Sequence[tuple[int, float]], larger: bool | None) -> MetricSummary:
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
    best_point = (None, None) if best is None else (best[1], best[0])
    return MetricSummary(name, first, first_step, last, last_step, *best_point)

"""Draw the learning curves of a run as an image with one panel per topic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from realign.api import Panel
from realign.own_files import make_folder, replace_bytes
from realign.records.metrics.shown_metrics import EVALUATION, with_held_out

TRAINING, HELD_OUT = "#2456c4", "#c2551d"
"""Colors of metrics of the training batch and of evaluations, as in the report."""
FURTHER = ("#1f7f5c", "#8a3fb5", "#8a6d00", "#b82c66", "#0b7a8f", "#5b6270")
"""Colors of further metrics in a panel."""
GRAY = "#5a616e"
_SMOOTHED_FROM = 60
"""Points from which a curve is smoothed."""
WINDOW = 1 / 30
"""Width of the smoothing window as a share of the curve."""

SETTINGS: Mapping[str, Any] = {
    "font.size": 9,
    "figure.titlesize": 13,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.labelsize": 9,
    "axes.edgecolor": GRAY,
    "axes.labelcolor": GRAY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4de",
    "grid.linewidth": 0.8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.color": GRAY,
    "ytick.color": GRAY,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "savefig.dpi": 110,
}
"""Settings of matplotlib."""


def colors(metrics: Sequence[str], held_out: str) -> dict[str, str]:
    """Return the color of each metric of a panel: the first metric of training, the first of evaluation, then others.

    Args:
        metrics: Names of the metrics.
        held_out: Start of the names of evaluation metrics.
    """
    rest = iter(FURTHER * (len(metrics) // len(FURTHER) + 1))
    color_of: dict[str, str] = {}
    for name in metrics:
        color = HELD_OUT if name.startswith(held_out) else TRAINING
        color_of[name] = next(rest) if color in color_of.values() else color
    return color_of


def smooth_curve(values: Sequence[float]) -> list[float] | None:
    """Return centered moving averages of a curve, or None if it is too short to need them.

    The windows at both ends are shorter. Values that are not finite are ignored; an average of none is NaN.
    """
    if len(values) < _SMOOTHED_FROM:
        return None
    half = max(1, round(len(values) * WINDOW / 2))
    means = []
    for i in range(len(values)):
        window = [v for v in values[max(0, i - half) : i + half + 1] if math.isfinite(v)]
        means.append(sum(window) / len(window) if window else math.nan)
    return means


def split_unit(title: str) -> tuple[str, str]:
    """Return the title of a panel without its unit, and the unit, which is in parentheses at the end of the title."""
    if title.endswith(")") and "(" in title:
        name, unit = title[:-1].rsplit("(", 1)
        return name.strip(), unit
    return title, ""


Record = Mapping[str, float]


def draw_curves(phases: Mapping[str, Sequence[Record]], path: Path, *, title: str, panels: Sequence[Panel]) -> Path:
    """Draw the curves of one run or of consecutive runs, and write them to a PNG file.

    Each run has the same width in a panel, and its own step axis. A panel omits runs that lack its metrics, and
    metrics that are always 0 (up to 1e-6).

    Args:
        phases: Records of each run (`step` and metrics), in order.
        path: Path of the image.
        title: Title of the image.
        panels: Panels to draw, see `display.panels`. Held-out metrics (`eval/...`) are added. Empty panels are
            omitted.

    Returns:
        `path`.

    Raises:
        ValueError: All panels are empty.
    """
    # not pyplot, which keeps every figure in a global list and may pick a backend that needs a display
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    reported = (name for records in phases.values() for record in records for name in record)
    drawn = [(panel, lines) for panel in with_held_out(panels, reported) if (lines := _lines(panel, phases))]
    if not drawn:
        raise ValueError(f"No curves for {title!r}: none of the metrics of the panels were recorded.")
    columns = 2 if len(drawn) in (2, 4) else min(3, len(drawn))
    rows = -(-len(drawn) // columns)
    make_folder(path.parent)
    with rc_context(dict(SETTINGS)):
        figure = Figure(figsize=(4.6 * columns, 3.1 * rows + 0.5), layout="constrained")
        figure.suptitle(title, parse_math=False)
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for ax in axes[len(drawn) :]:
            ax.set_visible(False)
        for ax, (panel, lines) in zip(axes, drawn, strict=False):
            _draw_panel(ax, panel, lines, phases)
        picture = BytesIO()
        figure.savefig(picture, format=path.suffix[1:] or None)
    replace_bytes(path, picture.getvalue())
    return path


Points = list[tuple[float, float]]


def _lines(panel: Panel, phases: Mapping[str, Sequence[Record]]) -> dict[str, dict[str, Points]]:
    """Return the points (step, value) of each metric, for each run that has points to draw."""
    points_of: dict[str, dict[str, Points]] = {}
    for name, records in phases.items():
        for metric in panel.metrics:
            points = [(r["step"], r[metric]) for r in records if metric in r]
            if any(abs(value) > 1e-6 for _, value in points):
                points_of.setdefault(name, {})[metric] = points
    return points_of


def _draw_panel(
    ax: Any, panel: Panel, lines: dict[str, dict[str, Points]], phases: Mapping[str, Sequence[Record]]
) -> None:
    ticks: dict[float, str] = {}
    labelled: set[str] = set()
    color = colors(list(panel.metrics), EVALUATION)
    for place, (name, metrics) in enumerate(lines.items()):
        steps = max(1.0, *(record["step"] for record in phases[name]))
        for metric, points in metrics.items():
            x, y = [place + step / steps for step, _ in points], [value for _, value in points]
            smooth = smooth_curve(y)
            if smooth is not None:
                ax.plot(x, y, color=color[metric], linewidth=0.8, alpha=0.25)
            ax.plot(
                x,
                y if smooth is None else smooth,
                color=color[metric],
                linewidth=1.6,
                marker="o" if len(points) <= 40 else None,
                markersize=3,
                label=None if metric in labelled else panel.metrics[metric],
            )
            labelled.add(metric)
        if place:
            ax.axvline(place, color=GRAY, linestyle=":", linewidth=1)
        if len(phases) > 1:
            ax.annotate(
                name,
                (place + 0.5, 1.0),
                xycoords=("data", "axes fraction"),
                fontsize=8,
                color=GRAY,
                xytext=(0, -10),
                textcoords="offset points",
                ha="center",
                parse_math=False,
            )
        ticks |= {
            place: f"{ticks[place]} | 0" if place in ticks else "0",
            place + 0.5: f"{steps / 2:g}",
            place + 1: f"{steps:g}",
        }
    ax.set_xticks(list(ticks), list(ticks.values()))
    ax.set_xlim(0, len(lines))
    title, unit = split_unit(panel.title)
    ax.set_title(title, parse_math=False, loc="left")
    ax.set_ylabel(unit, parse_math=False)
    ax.set_xlabel("step")
    if max(abs(value) for metrics in lines.values() for points in metrics.values() for _, value in points) >= 10_000:
        ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.legend()

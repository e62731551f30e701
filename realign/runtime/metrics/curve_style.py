"""The style of all learning curves that are drawn as images: colors by meaning, smoothing, sizes of text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

TRAINING, HELD_OUT = "#2456c4", "#c2551d"
"""Colors of metrics of the training batch and of evaluations, as in the report."""
FURTHER = ("#1f7f5c", "#8a3fb5", "#8a6d00", "#b82c66", "#0b7a8f", "#5b6270")
"""Colors of further metrics in a panel."""
GRAY = "#5a616e"
SMOOTHED_FROM = 60
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
    found: dict[str, str] = {}
    for name in metrics:
        color = HELD_OUT if name.startswith(held_out) else TRAINING
        found[name] = next(rest) if color in found.values() else color
    return found


def smoothed(values: Sequence[float]) -> list[float] | None:
    """Return centered moving averages of a curve, or None if it is too short to need them.

    The windows at both ends are shorter. Values that are not finite are ignored; an average of none is NaN.
    """
    if len(values) < SMOOTHED_FROM:
        return None
    half = max(1, round(len(values) * WINDOW / 2))
    found = []
    for i in range(len(values)):
        window = [v for v in values[max(0, i - half) : i + half + 1] if math.isfinite(v)]
        found.append(sum(window) / len(window) if window else math.nan)
    return found


def split_unit(title: str) -> tuple[str, str]:
    """Return the title of a panel without its unit, and the unit, which is in parentheses at the end of the title."""
    if title.endswith(")") and "(" in title:
        name, unit = title[:-1].rsplit("(", 1)
        return name.strip(), unit
    return title, ""


__all__ = ["GRAY", "SETTINGS", "colors", "smoothed", "split_unit"]

"""Figures of the curves: means over seeds, with bands of one standard deviation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.curves.comparison import Curves
from benchmarks.curves.replay import DIFFERENCES
from benchmarks.curves.runs import CURVES, NAMES

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
STYLES = ("-", "--", ":", "-.")

Panels = Mapping[str, Mapping[str, Curves]]
"""Title of a panel -> label of a set of curves -> the set."""


def draw(rows: Sequence[tuple[str, Panels]], path: Path, *, title: str) -> None:
    """Draw one row of panels per entry of `rows`, and write the figure.

    Args:
        rows: label of the row, and its panels.
        path: path of the PNG file.
        title: title of the figure.
    """
    from matplotlib.figure import Figure

    columns = max(len(panels) for _, panels in rows)
    figure = Figure(figsize=(4.4 * columns, 3.0 * len(rows) + 0.5), layout="constrained")
    figure.suptitle(title, fontsize=12)
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for line, (label, panels) in zip(axes, rows, strict=True):
        for ax in line[len(panels) :]:
            ax.set_visible(False)
        for ax, (name, sets) in zip(line, panels.items(), strict=False):
            _draw_panel(ax, sets)
            ax.set_title(f"{label}: {name}" if label else name, fontsize=10)
    axes[0][0].legend(fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def draw_replay(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the curves of both implementations on identical samples, and their differences; write the figure.

    Args:
        records: records of the steps, see `replay.py`.
        path: path of the PNG file.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4 * (len(CURVES) + 1), 3.4), layout="constrained")
    figure.suptitle("SmolLM2-135M on identical samples", fontsize=12)
    *curves, last = figure.subplots(1, len(CURVES) + 1)
    steps = range(1, len(records) + 1)
    for ax, (name, title) in zip(curves, CURVES.items(), strict=True):
        for label, color, style, width in (("realign", COLORS[0], "-", 3.0), ("padded", COLORS[1], "--", 1.3)):
            values = [record[label][name] for record in records]
            ax.plot(steps, values, color=color, linestyle=style, linewidth=width, label=NAMES[label])
        ax.set_title(title, fontsize=10)
    for (name, title), color, style in zip(DIFFERENCES.items(), COLORS[1:], STYLES, strict=False):
        last.semilogy(steps, [record[name] for record in records], color=color, linestyle=style, label=title)
    last.set_title("differences", fontsize=10)
    for ax in (*curves, last):
        ax.set_xlabel("step (rollout batch)", fontsize=9)
        ax.tick_params(labelsize=8)
        ax.grid(alpha=0.25)
    for ax in (curves[0], last):
        ax.legend(fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw_panel(ax: Any, sets: Mapping[str, Curves]) -> None:
    for (label, curves), color, style in zip(sets.items(), COLORS, STYLES, strict=False):
        steps = np.arange(1, curves.shape[1] + 1)
        mean, deviation = curves.mean(0), curves.std(0, ddof=1)
        ax.plot(steps, mean, color=color, linestyle=style, linewidth=1.5, label=label)
        ax.fill_between(steps, mean - deviation, mean + deviation, color=color, alpha=0.18, linewidth=0)
    ax.set_xlabel("step (rollout batch)", fontsize=9)
    ax.tick_params(labelsize=8)
    ax.grid(alpha=0.25)

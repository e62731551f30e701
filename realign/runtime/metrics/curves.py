"""Draw the learning curves of a run as an image with one panel per topic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realign.api import Panel
from realign.runtime.display import with_held_out

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
    from matplotlib.figure import Figure

    reported = (name for records in phases.values() for record in records for name in record)
    drawn = [(panel, lines) for panel in with_held_out(panels, reported) if (lines := _lines(panel, phases))]
    if not drawn:
        raise ValueError(f"No curves for {title!r}: none of the metrics of the panels were recorded.")
    columns = min(3, len(drawn))
    rows = -(-len(drawn) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.1 * rows + 0.5), layout="constrained")
    figure.suptitle(title, fontsize=13, parse_math=False)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for ax in axes[len(drawn) :]:
        ax.set_visible(False)
    for ax, (panel, lines) in zip(axes, drawn, strict=False):
        _draw_panel(ax, panel, lines, phases)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


Points = list[tuple[float, float]]


def _lines(panel: Panel, phases: Mapping[str, Sequence[Record]]) -> dict[str, dict[str, Points]]:
    """Return the points (step, value) of each metric, for each run that has points to draw."""
    found: dict[str, dict[str, Points]] = {}
    for name, records in phases.items():
        for metric in panel.metrics:
            points = [(r["step"], r[metric]) for r in records if metric in r]
            if any(abs(value) > 1e-6 for _, value in points):
                found.setdefault(name, {})[metric] = points
    return found


def _draw_panel(
    ax: Any, panel: Panel, lines: dict[str, dict[str, Points]], phases: Mapping[str, Sequence[Record]]
) -> None:
    ticks: dict[float, str] = {}
    labelled: set[str] = set()
    for place, (name, metrics) in enumerate(lines.items()):
        steps = max(1.0, *(record["step"] for record in phases[name]))
        for metric, points in metrics.items():
            ax.plot(
                [place + step / steps for step, _ in points],
                [value for _, value in points],
                color=f"C{list(panel.metrics).index(metric)}",
                linewidth=1.4,
                marker="o" if len(points) <= 40 else None,
                markersize=3,
                label=None if metric in labelled else panel.metrics[metric],
            )
            labelled.add(metric)
        if place:
            ax.axvline(place, color="0.5", linestyle=":", linewidth=1)
        if len(phases) > 1:
            ax.annotate(
                name,
                (place + 0.5, 1.0),
                xycoords=("data", "axes fraction"),
                fontsize=8,
                color="0.4",
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
    ax.set_title(panel.title, fontsize=10)
    ax.set_xlabel("step", fontsize=9)
    ax.tick_params(labelsize=8)
    ax.grid(alpha=0.25)
    ax.legend(fontsize=8, frameon=False)

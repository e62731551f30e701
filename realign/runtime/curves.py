"""Learning curves as a picture: one panel per subject, drawn from the history of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Panel:
    """One set of axes: a title with the unit, and the metrics that are drawn, with their labels."""

    title: str
    metrics: Mapping[str, str]


PANELS = (
    Panel("reward per response", {"reward": "training batch (sampled)", "eval/reward": "held out"}),
    Panel("negative log-likelihood (nats per token)", {"nll": "training batch"}),
    Panel("entropy (nats per token)", {"entropy": "training batch"}),
    Panel("KL (nats)", {"ref_kl_per_sequence": "to reference, per sequence", "approx_kl": "of one step, per token"}),
    Panel("response length (tokens)", {"response_tokens": "training batch", "eval/response_tokens": "held out"}),
    Panel("clip fraction", {"clip_fraction": "policy ratio"}),
    Panel("gradient norm", {"grad_norm": "before clipping"}),
)
Record = Mapping[str, float]


def draw_curves(
    phases: Mapping[str, Sequence[Record]], path: Path, *, title: str, panels: Sequence[Panel] = PANELS
) -> Path:
    """Draw the curves of one or more runs that follow each other, and write a PNG.

    Args:
        phases: for each run its records (`step` and metrics), in order; steps are counted on over the phases.
        path: where the picture goes.
        title: above the picture.
        panels: what to draw; a panel none of whose metrics were recorded is left out.

    Returns:
        `path`.
    """
    from matplotlib.figure import Figure

    offsets, total = [], 0
    for records in phases.values():
        offsets.append(total)
        total += int(max((r["step"] for r in records), default=0))
    used = [p for p in panels if any(m in r for m in p.metrics for records in phases.values() for r in records)]
    if not used:
        raise ValueError(f"no metric to draw for {title!r}: none of the panels' metrics were recorded")
    columns = min(3, len(used))
    rows = -(-len(used) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.1 * rows + 0.5), layout="constrained")
    figure.suptitle(title, fontsize=13)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for ax in axes[len(used) :]:
        ax.set_visible(False)
    for ax, panel in zip(axes, used, strict=False):
        for colour, (metric, label) in enumerate(panel.metrics.items()):
            labelled = False
            for offset, records in zip(offsets, phases.values(), strict=True):
                points = [(offset + r["step"], r[metric]) for r in records if metric in r]
                if not points:
                    continue
                sparse = len(points) <= 40
                ax.plot(
                    *zip(*points, strict=True),
                    color=f"C{colour}",
                    linewidth=1.4,
                    marker="o" if sparse else None,
                    markersize=3,
                    label=None if labelled else label,
                )
                labelled = True
        ax.set_title(panel.title, fontsize=10)
        ax.set_xlabel("step", fontsize=9)
        ax.tick_params(labelsize=8)
        ax.grid(alpha=0.25)
        ax.set_xlim(0, total)
        ax.legend(fontsize=8, frameon=False)
        for offset, name in zip(offsets, phases, strict=True):
            if len(phases) > 1:
                if offset:
                    ax.axvline(offset, color="0.5", linestyle=":", linewidth=1)
                ax.annotate(
                    name,
                    (offset, 1.0),
                    xycoords=("data", "axes fraction"),
                    fontsize=8,
                    color="0.4",
                    xytext=(3, -10),
                    textcoords="offset points",
                )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path

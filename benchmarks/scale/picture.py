"""Figure of `rollouts`: reward over time, and measured and simulated seconds of a step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def draw(rows: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Write the figure to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", width_ratios=(3, 2))
    colors = plt.get_cmap("tab10").colors
    for color, (name, row) in zip(colors, rows.items(), strict=False):
        for number, curve in enumerate(row["curves"]):
            start = curve[0][0] - row["step_s"]
            left.plot(
                [seconds - start for seconds, _ in curve],
                [reward for _, reward in curve],
                color=color,
                alpha=0.8,
                label=None if number else name,
            )
    left.set(title="Reward over time, one line per seed", xlabel="seconds", ylabel="reward", ylim=(0, 1.02))
    left.legend(frameon=False, fontsize=8)
    places = range(len(rows))
    right.barh([p - 0.2 for p in places], [r["step_s"] for r in rows.values()], 0.38, label="measured", color="#2563eb")
    predictions = [r["predicted_s"] for r in rows.values()]
    right.barh([p + 0.2 for p in places], predictions, 0.38, label="simulated", color="#cbd5e1")
    right.set_yticks(list(places), list(rows))
    right.invert_yaxis()
    right.set(title="Seconds of a step", xlabel="seconds")
    right.legend(frameon=False, fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)

"""Figure of a comparison: seconds of a step of both sides, divided into rollout and training.

    python -m benchmarks.peer > report.txt; python -m benchmarks.peer.picture report.txt --out performance.png

Reads the last line of each file, and shows the scenarios of all files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SIDES = {"trl": "TRL", "realign": "realign"}
COLORS = {"trl": ("#9aa5b1", "#52606d"), "realign": ("#7fb3e6", "#1f5fa8")}
PARTS = ("rollout", "training")
NAMES = {"ppo_long_tail": "PPO, 4 epochs,\nlong tail", "many": "192 responses", "large_vocabulary": "vocabulary 32k"}


def draw(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Draw two bars per scenario, as fractions of TRL's step, labeled with the seconds and the ratio."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.2 + 1.45 * len(rows), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for i, row in enumerate(rows):
        whole = row["seconds"]["trl"]["wall"]
        for side, name in SIDES.items():
            seconds, x, bottom = row["seconds"][side], i + (0.2 if side == "realign" else -0.2), 0.0
            for part, color in zip(PARTS, COLORS[side], strict=True):
                height = seconds[part] / whole
                label = f"{name}, {part}" if i == 0 else None
                axes.bar(x, height, 0.38, bottom, color=color, label=label)
                bottom += height
            ratio = f"\n{row['ratio']['wall']:.1f}x" if side == "realign" else ""
            axes.text(x, bottom + 0.02, f"{seconds['wall']:.1f} s{ratio}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(rows)), [NAMES.get(r["scenario"], r["scenario"].replace("_", " ")) for r in rows])
    axes.set_ylim(0, 1.3)
    axes.set_ylabel("time of a step (TRL = 1)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=4, loc="upper center", frameon=False, fontsize=8)
    figure.savefig(out, dpi=150)


def main(given: Sequence[str] | None = None) -> None:
    """Read reports and draw them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(given)
    rows = [row for file in args.reports for row in json.loads(file.read_text().splitlines()[-1])["scenarios"]]
    draw(rows, args.out)


if __name__ == "__main__":
    main()

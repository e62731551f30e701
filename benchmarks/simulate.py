"""Simulate 8 to 1,024 accelerators (`benchmarks.cluster`) with the simulator of `realign plan`.

python -m benchmarks.simulate     # prints a table, draws a figure, and prints one JSON line
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import cluster
from benchmarks.report import arguments


def main(given: Sequence[str] | None = None) -> None:
    """Simulate all numbers of accelerators; write the table, the figure and one JSON line."""
    words = arguments({"picture": "runs/scaling.png", "processes": "2"}, given)
    started = time.time()
    rows = cluster.sweep(int(words["processes"]))
    print(cluster.show(rows))
    picture = Path(words["picture"])
    picture.parent.mkdir(parents=True, exist_ok=True)
    cluster.draw(rows, picture)
    print(json.dumps({"benchmark": "simulate", "seconds": round(time.time() - started), "rows": rows}))


if __name__ == "__main__":
    main()

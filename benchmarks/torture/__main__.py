"""Fault injection: kills, damaged checkpoints and other faults, compared with undisturbed runs.

    make torture                                                     # 20 kills, 5 damaged checkpoints, all faults
    python -m benchmarks.torture kills=3 damages=1 steps=10 seed=1 faults=none folder=runs/torture
    python -m benchmarks.torture kills=0 faults=disk,clock           # one or more groups of faults, no kills

`kills` describes the run that is killed; `faults` describes the other faults, and when an attack counts as survived.

Prints a table of the kills and one of the faults and, as the last line, one JSON object. The exit code is 1 if any data
was lost, or if an attack was not survived.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import arguments, facts
from benchmarks.torture import faults, kills

DEFAULTS = {"kills": "20", "damages": "5", "steps": "60", "threads": "1", **faults.DEFAULTS}


def torture(folder: Path, words: Mapping[str, str]) -> dict[str, Any]:
    """Execute the requested sections; return their results with `good`: whether no data was lost."""
    result: dict[str, Any] = {"good": True}
    if words["kills"] != "0":
        result |= kills.kills_of(folder, words)
        result["good"] = kills.is_good(result)
    if words["faults"] != "none":
        result |= faults.section({**words, "folder": str(folder)})
        result["good"] &= result["attacks"] == result["attacks_survived"] and not result["attack_samples_lost"]
    return result


def main(given: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if any data was lost."""
    words, start = arguments(DEFAULTS, given), time.time()
    if words["folder"]:
        result = torture(Path(words["folder"]).resolve(), words)
    else:
        with tempfile.TemporaryDirectory() as folder:
            result = torture(Path(folder), words)
    print(json.dumps({**result, "seconds": round(time.time() - start), **facts()}))
    return not result["good"]


if __name__ == "__main__":
    sys.exit(main())

"""Process of one side: reads step numbers from stdin and answers each with one line of JSON."""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peer.work import SCENARIOS


def memory_mib() -> float:
    """Return the current resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    """Execute requested steps until stdin ends."""
    spec: dict[str, Any] = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps the output of libraries apart from the answers
    import torch

    torch.set_num_threads(spec["threads"])
    side_module = importlib.import_module(f"benchmarks.peer.side_{spec['side']}")
    side = side_module.Side(SCENARIOS[spec["scenario"]], Path(spec["folder"]), spec["steps"], spec["options"])
    loaded = memory_mib()
    print(json.dumps({"ready": True, "loaded_mib": loaded}), file=out, flush=True)
    for line in sys.stdin:
        cpu = time.process_time()
        result = side.step(int(line))
        result["cpu"] = time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(result | {"peak_mib": peak, "loaded_mib": loaded}), file=out, flush=True)


if __name__ == "__main__":
    main()

"""One experiment in one process, under torchrun and on Ray; synchronous and asynchronous rollout.

    make scale                                              # all parts, under 10 minutes on two cores, loopback only
    python -m benchmarks.scale parts=runtimes steps=8
    python -m benchmarks.scale parts=rollouts seeds=1 folder=runs/scale

runtimes   GRPO with a reference model, a Qwen2 with 3 million weights and 128 responses per step. Runs in one process
           with one thread; under torchrun with two FSDP ranks; on Ray with one worker for the actor and one for the
           reference; and on Ray with the actor on two ranks. Reports the largest difference of the final weights, the
           seconds of a step, and the RPC overhead of a call.
rollouts   Decoupled PPO with a reward that takes 1 s on average. Its duration is log-normal and identical for all
           responses to a prompt. Compares synchronous rollout with asynchronous rollout (max_staleness=2), in
           responses per second and final reward per seed, and runs once with a rollout worker on Ray.

Prints a table for each part, and one JSON object as the last line. The exit code is 1 if a part
failed, or if a run that should be bitwise reproducible is not.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.report import arguments, facts
from benchmarks.scale.rollouts import rollouts
from benchmarks.scale.runtimes import runtimes
from benchmarks.scale.task import prepare

Part: TypeAlias = Callable[[Path, Path, Mapping[str, str]], dict[str, Any]]

PARTS: Mapping[str, Part] = {"runtimes": runtimes, "rollouts": rollouts}
DEFAULTS = {
    "parts": ",".join(PARTS),
    "steps": "12",
    "rollout_steps": "14",
    "seeds": "3",
    "folder": "",
}


def scale(folder: Path, words: Mapping[str, str]) -> dict[str, Any]:
    """Run the requested parts. A failing part is reported with its error, and the other parts still run."""
    folder.mkdir(parents=True, exist_ok=True)
    task = prepare(folder / "task")
    results: dict[str, Any] = {}
    for name in words["parts"].split(","):
        print(f"\n{name}", flush=True)
        started = time.time()
        try:
            results[name] = PARTS[name](folder, task, words)
        except Exception as error:
            traceback.print_exc()
            results[name] = {"good": False, "error": f"{type(error).__name__}: {error}"[:2000]}
        results[name]["seconds"] = round(time.time() - started)
    return results


def main(given: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a part is not good."""
    words, started = arguments(DEFAULTS, given), time.time()
    if wrong := [name for name in words["parts"].split(",") if name not in PARTS]:
        sys.exit(f"unknown part {wrong[0]!r}; valid: {', '.join(PARTS)}")
    if words["folder"]:
        results = scale(Path(words["folder"]).resolve(), words)
    else:
        with tempfile.TemporaryDirectory() as folder:
            results = scale(Path(folder), words)
    good = all(part["good"] for part in results.values())
    print(
        json.dumps({"benchmark": "scale", "good": good, "seconds": round(time.time() - started), **facts(), **results})
    )
    return not good


if __name__ == "__main__":
    sys.exit(main())

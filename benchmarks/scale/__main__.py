"""One experiment in one process, under torchrun and on Ray; rollouts in the step and ahead of it; kills.

    make scale                                              # all parts, under 10 minutes on two cores, loopback only
    python -m benchmarks.scale parts=runtimes steps=8
    python -m benchmarks.scale parts=rollouts seeds=1 folder=runs/scale

runtimes   GRPO with a reference, a Qwen2 of 3 million weights and 128 responses a step: one process with one thread;
           two FSDP ranks under torchrun; Ray with a worker for the actor and one for the reference; Ray with the actor
           on two ranks. Largest difference of the final weights, seconds of a step, what the hops of a call take.
rollouts   Decoupled PPO with a reward that takes 1 s on average, log-normal, the same for each response of a prompt:
           rollouts within the step, and ahead of it with max_staleness=2. Responses per second, and the final reward on
           each seed. Then once with a rollout worker on Ray. The simulator (`benchmarks.simulate`) says beforehand what
           a step should take, from costs that are measured here without waiting for rewards.
recovery   SIGKILL for a Ray worker, and for a rank under torchrun: until the run is back where it was, and whether the
           final weights are those of the run left alone.

Prints a table for each part, draws a picture, and prints one JSON object as the last line. The exit code is 1 if a
part failed or a run that should be exact is not.
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
from benchmarks.scale.picture import draw
from benchmarks.scale.recovery import recovery
from benchmarks.scale.rollouts import rollouts
from benchmarks.scale.runtimes import runtimes
from benchmarks.scale.task import prepare

Part: TypeAlias = Callable[[Path, Path, Mapping[str, str]], dict[str, Any]]

PARTS: Mapping[str, Part] = {"runtimes": runtimes, "rollouts": rollouts, "recovery": recovery}
DEFAULTS = {
    "parts": ",".join(PARTS),
    "steps": "12",
    "rollout_steps": "14",
    "seeds": "3",
    "folder": "",
    "picture": "runs/scale.png",
}


def scale(folder: Path, words: Mapping[str, str]) -> dict[str, Any]:
    """The parts that are asked for; one that fails is reported with its error, and the others still run."""
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
    """Run it; 1 if a part is not good."""
    words, started = arguments(DEFAULTS, given), time.time()
    if wrong := [name for name in words["parts"].split(",") if name not in PARTS]:
        sys.exit(f"unknown part {wrong[0]!r}; valid: {', '.join(PARTS)}")
    if words["folder"]:
        results = scale(Path(words["folder"]).resolve(), words)
    else:
        with tempfile.TemporaryDirectory() as folder:
            results = scale(Path(folder), words)
    if "curves" in str(results.get("rollouts")):
        draw(results["rollouts"]["rows"], Path(words["picture"]))
    good = all(part["good"] for part in results.values())
    print(
        json.dumps({"benchmark": "scale", "good": good, "seconds": round(time.time() - started), **facts(), **results})
    )
    return not good


if __name__ == "__main__":
    sys.exit(main())

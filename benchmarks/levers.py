"""What each optimization gives: a step of realign with and without it, in alternation, all others on.

    python -m benchmarks.levers                                    # the scenario `real`, two steps of each side
    python -m benchmarks.levers scenario=long_tail levers=shared_prompts,parallel_passes steps=5

A setting turns the optimization off, so the factors cannot be multiplied: without `compiled_decode`, for instance, bf16
products of training run in torch too. The work is that of `benchmarks.peer`: both sides are processes that take turns,
with the same prompts and response lengths.

Prints a table and, as the last line, one JSON object.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peer.process import STEPS_OF_A_TURN, Worker, turns
from benchmarks.peer.side_realign import LEVERS
from benchmarks.peer.work import SCENARIOS, Scenario, write_prompts
from benchmarks.report import arguments, facts, table

PARTS = ("wall", "rollout", "training")


def gain(scenario: Scenario, lever: str, steps: int, threads: int) -> dict[str, Any]:
    """Return the median seconds of each part of a step, with all optimizations and without one, and their ratios."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        scenario.save_models(folder)
        worked = steps * STEPS_OF_A_TURN
        write_prompts(scenario, worked, folder / "prompts.jsonl")
        sides = {name: Worker("realign", scenario, folder, worked, threads, without=name) for name in ("", lever)}
        answers = list(turns(sides, steps))
    assert all(answer[""]["lengths"] == answer[lever]["lengths"] for answer in answers)
    on, off = ({part: statistics.median(a[name][part] for a in answers) for part in PARTS} for name in sides)
    return {"lever": lever, "on": on, "off": off, "ratio": {part: round(off[part] / on[part], 2) for part in PARTS}}


def main(given: Sequence[str] | None = None) -> None:
    """Measure the requested levers; print the table and the JSON line."""
    words = arguments({"scenario": "real", "levers": ",".join(LEVERS), "steps": "2", "threads": "2"}, given)
    levers = words["levers"].split(",")
    for kind, names, known in (("scenario", [words["scenario"]], SCENARIOS), ("lever", levers, LEVERS)):
        if wrong := [name for name in names if name not in known]:
            sys.exit(f"unknown {kind} {wrong[0]!r}; valid: {', '.join(known)}")
    found = []
    for lever in levers:
        found.append(gain(SCENARIOS[words["scenario"]], lever, int(words["steps"]), int(words["threads"])))
        print(lever, found[-1]["ratio"], file=sys.stderr, flush=True)
    lines = [(r["lever"], *(f"{r['off'][p]:.2f} / {r['on'][p]:.2f} = {r['ratio'][p]}x" for p in PARTS)) for r in found]
    print(table(("without / with, s", "step", "rollout", "training"), lines))
    print(json.dumps({"benchmark": "levers", "scenario": words["scenario"], **facts(), "levers": found}))


if __name__ == "__main__":
    main()

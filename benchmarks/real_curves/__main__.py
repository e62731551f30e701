"""Curves of SmolLM2-135M-Instruct on three tasks, with seeds and controls (docs/studies/real-curves.md).

    python -m benchmarks.real_curves                    # 90 minutes; repeat it until nothing is left
    python -m benchmarks.real_curves minutes=20 runs=sums_grpo_0,sums_grpo_control_0
    python -m benchmarks.real_curves minutes=0                                # only the tables and the picture

A run whose record is in `results` is kept. When the minutes are over, the current run writes a checkpoint and stops,
and the next call resumes it. Prints the tables of the page at the end, and draws the picture.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.real_curves.report import constants, draw, groups, table
from benchmarks.real_curves.runs import RUNS, SFT, STEPS, Record, execute, overrides
from benchmarks.real_curves.tasks import best_constant, prepare
from benchmarks.report import arguments, facts
from realign.demo.smollm2 import smollm2

DEFAULTS = {
    "minutes": "90",
    "runs": ",".join(RUNS),
    "folder": "runs/real_curves",
    "results": "benchmarks/real_curves/results.jsonl",
    "picture": "docs/images/real_curves.png",
    "model": "",
    "steps": str(STEPS),
}


def read(path: Path) -> list[Record]:
    """Return the records of a file of JSON lines; empty without the file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def append(path: Path, record: Record) -> None:
    """Add a record to a results file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def main(given: Sequence[str] | None = None) -> int:
    """Execute what is missing, until the minutes are over."""
    words = arguments(DEFAULTS, given)
    started = time.monotonic()
    deadline = started + 60 * float(words["minutes"])
    folder = Path(words["folder"])
    results = Path(words["results"])
    names = words["runs"].split(",")
    if unknown := [name for name in names if name not in RUNS]:
        sys.exit(f"unknown run {unknown[0]!r}; valid: {', '.join(RUNS)}")
    finished = {record.get("run") for record in read(results)}
    for name in names:
        if name in finished or time.monotonic() >= deadline:
            continue
        run = RUNS[name]
        if run.after_sft and not (folder / SFT / "final" / "actor" / "config.json").is_file():
            sys.exit(f"{name} starts from {SFT}, which has not run in {folder}. Add it to runs")
        files = folder / "tasks" / run.task
        if not (files / "demonstrations.jsonl").is_file():
            prepare(run.task, files)
        model = words["model"] or str(smollm2())
        began = time.monotonic()
        record = execute(run, folder, overrides(run, folder, model, steps=int(words["steps"])), deadline)
        if record is None:
            print(f"{name}: stopped at the limit of {words['minutes']} minutes. Repeat the command to resume it")
            break
        if run.task not in constants(read(results)):
            append(results, best_constant(run.task, read(files / "train.jsonl"), read(files / "held_out.jsonl")))
        append(results, record | facts())
        print(f"{name}: {(time.monotonic() - began) / 60:.1f} min, held out {record['held_out']}", flush=True)
    records = read(results)
    print(table(records))
    if groups(records):
        draw(records, Path(words["picture"]))
        print(f"\npicture: {words['picture']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

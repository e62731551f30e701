"""Faults other than kills: small attacks on real runs by the command line, and what is left of the runs.

Each attack starts one process of the command line (`resume=auto`, GRPO on additions, 6 steps) under a fault. An attack
is survived if all of this is true:

1. The process ends by itself with an exit code that the table of exit codes assigns to this fault.
2. Its output has no traceback, exactly one line of error with the exit codes 2 and 75, and none with 0, 130 and 143.
3. The output names the fault, where the attack says so.
4. Once the fault is over, the same command resumes the run (if it was not complete) and ends with 0. Then metrics
   (without timings), samples and final weights are equal to those of an undisturbed run.

For rewards and environments, the undisturbed run is one in which the same calls raise an exception. Several attacks on
input files share a run folder, and the fourth condition is checked once after them. If a process accepts a crafted
checkpoint or model (exit code 0), its own results are not compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.report import arguments, table
from benchmarks.torture.attacks import Lab, Result, Series
from benchmarks.torture.behavior import clocks, environments, rewards
from benchmarks.torture.disks import PRIVATE, disks, pipes, private, read_only
from benchmarks.torture.inputs import checkpoints, models, rows

DEFAULTS = {"faults": "all", "crafted": "3", "seed": "0", "folder": ""}


def series_of(seed: int, crafted: int) -> Mapping[str, Sequence[Series]]:
    """Return all series by group.

    Args:
        seed: seed of the crafted values.
        crafted: number of crafted checkpoints, and of crafted model folders.
    """
    return {
        "disk": disks(),
        "read_only": read_only(),
        "pipes": pipes(),
        "clock": clocks(),
        "rewards": rewards(),
        "environment": environments(),
        "rows": rows(),
        "checkpoints": checkpoints(seed, crafted),
        "models": models(seed, crafted),
    }


def faults(folder: Path, words: Mapping[str, str]) -> tuple[list[Result], dict[str, Any]]:
    """Execute the requested groups of attacks; return their results and the counts for the JSON line."""
    groups = series_of(int(words["seed"]), int(words["crafted"]))
    wanted = list(groups) if words["faults"] == "all" else words["faults"].split(",")
    if unknown := [name for name in wanted if name not in groups]:
        sys.exit(f"unknown group {unknown[0]!r}; valid: all, none, {', '.join(groups)}")
    lab, results, shown = Lab(folder), [], Console(stderr=True)
    for series in (series for name in wanted for series in groups[name]):
        for result in lab.execute(series):
            results.append(result)
            shown.print(f"{result.name}: {_word(result)}", highlight=False, markup=False, soft_wrap=True)
    return results, counts(results)


def counts(results: Sequence[Result]) -> dict[str, Any]:
    """Return the counts of attacks for the JSON line."""
    tried = [result for result in results if not result.not_possible]
    lost = {result.series: result.lost for result in tried}
    return {
        "attacks": len(tried),
        "attacks_survived": sum(not result.problem for result in tried),
        "attacks_not_possible_here": len(results) - len(tried),
        "attack_samples_lost": sum(lost.values()),
    }


def _word(result: Result) -> str:
    if result.not_possible:
        return f"untried: {result.not_possible}"
    return f"FAILED: {result.problem}" if result.problem else "survived"


def section(words: Mapping[str, str]) -> dict[str, Any]:
    """Execute the attacks in a process that may mount, print the table, and return the counts."""
    prefix = private()
    given = [f"{name}={words[name]}" for name in DEFAULTS]
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "benchmarks.torture.faults", *given],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, **({PRIVATE: "1"} if prefix else {})},
    )
    lines = done.stdout.splitlines()
    print("\n".join(lines[:-1]))
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def main(given: Sequence[str] | None = None) -> None:
    """Execute the attacks in this process."""
    words = arguments(DEFAULTS, given)
    if words["folder"]:
        results, report = faults(Path(words["folder"]).resolve() / "faults", words)
    else:
        with tempfile.TemporaryDirectory() as folder:
            results, report = faults(Path(folder), words)
    shown = [(r.name, "" if r.code is None else str(r.code), _word(r).partition(":")[0]) for r in results]
    print(table(("attack", "exit code", "result"), shown))
    print("\n".join(f"{r.name}: {_word(r)}" for r in results if r.problem or r.not_possible))
    print(json.dumps(report))


if __name__ == "__main__":
    main()

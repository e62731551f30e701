"""Large runs: many steps, many prompts, and a large file. What they need of memory, descriptors, files and time.

python -m benchmarks.torture kills=0 faults=none sizes=steps,prompts,bytes long_steps=5000 prompts=200000 megabytes=1000
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import table
from benchmarks.torture.attacks import Lab
from benchmarks.torture.runs import Launch, Run

DEFAULTS = {"sizes": "none", "long_steps": "5000", "prompts": "200000", "megabytes": "1000"}
LIMIT_S = 4 * 3600
SMALL = (
    "experiment=grpo_arithmetic",
    "interfaces.actor.generation={n: 2, max_new_tokens: 2, temperature: 1.0}",
    "interfaces.reward.function=CODE/faulty.py:worth",
    "interfaces.reward.workers=1",
    "evaluation=null",
    "batch_prompts=2",
    "sample_prompts=1",
    "threads=1",
    "models.actor.path=TASK/model",
)


def usage(process: int, folder: Path) -> dict[str, int]:
    """Return the memory (MB), descriptors, threads, child processes and files of a run."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    )
    children = Path(f"/proc/{process}/task/{process}/children")
    return {
        "rss_mb": int(status["VmRSS"].split()[0]) // 1024,
        "peak_mb": int(status["VmHWM"].split()[0]) // 1024,
        "descriptors": len(os.listdir(f"/proc/{process}/fd")),
        "threads": int(status["Threads"]),
        "children": len(children.read_text(encoding="utf-8").split()) if children.exists() else 0,
        "files": sum(len(files) for _, _, files in os.walk(folder)),
    }


def watched(run: Run, moments: list[int]) -> dict[str, Any]:
    """Execute a run; return its seconds until the first step, and its usage at the given steps.

    Raises:
        RuntimeError: it did not end with 0.
    """
    usages: dict[str, Any] = {}
    with Launch(run) as launch:
        for step in moments:
            if launch.wait_until(lambda step=step: run.steps() >= step, 0.5, LIMIT_S):  # type: ignore[misc]
                usages.setdefault("first_step_s", round(time.time() - launch.started, 1))
                usages[f"step {step}"] = usage(launch.process.pid, run.folder)
        launch.finish()
    rows = [json.loads(line) for line in run.records()]
    usages["last_step"] = rows[-1]["step"]
    return usages


def write_rows(path: Path, rows: int, width: int) -> None:
    """Write a JSONL file of additions, with a further column of `width` characters."""
    chooser = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            a, b = chooser.randrange(10, 100), chooser.randrange(10, 100)
            row = {"prompt": f"{a}+{b}=", "answer": str(a + b), "number": number, "source": "x" * width}
            file.write(json.dumps(row) + "\n")


def long_run(lab: Lab, words: Mapping[str, str]) -> dict[str, Any]:
    """Execute many small steps, with checkpoints and saved models."""
    steps = int(words["long_steps"])
    saves = max(steps // 50, 1)
    settings = (f"steps={steps}", f"checkpoint.every_steps={saves}", f"save_every_steps={saves}", "keep_saves=2")
    run = lab.run("long", (*SMALL, *settings, "data.path=TASK/prompts.jsonl"))
    return watched(run, sorted({max(steps // 10, 1), max(steps // 2, 1), max(steps - 1, 1)}))


def many_prompts(lab: Lab, words: Mapping[str, str]) -> dict[str, Any]:
    """Execute two steps on a file with many rows."""
    return _on_rows(lab, "prompts", int(words["prompts"]), 0)


def large_file(lab: Lab, words: Mapping[str, str]) -> dict[str, Any]:
    """Execute two steps on a file with rows of 10 kB."""
    return _on_rows(lab, "bytes", int(words["megabytes"]) * 100, 10_000)


def _on_rows(lab: Lab, name: str, rows: int, width: int) -> dict[str, Any]:
    path = lab.folder / f"{name}.jsonl"
    write_rows(path, rows, width)
    usages = watched(lab.run(name, (*SMALL, "steps=2", f"data.path={path}")), [1])
    usages["file_mb"] = path.stat().st_size // 10**6
    path.unlink()
    return usages


SIZES: Mapping[str, Callable[[Lab, Mapping[str, str]], dict[str, Any]]] = {
    "steps": long_run,
    "prompts": many_prompts,
    "bytes": large_file,
}


def sizes(folder: Path, words: Mapping[str, str]) -> dict[str, Any]:
    """Execute the requested large runs, print a table, and return what they needed."""
    lab = Lab(folder / "sizes")
    usages = {}
    for name in SIZES if words["sizes"] == "all" else words["sizes"].split(","):
        usages[name] = SIZES[name](lab, words)
        moments = {moment: used for moment, used in usages[name].items() if isinstance(used, dict)}
        print(table((name, *next(iter(moments.values()))), [(m, *map(str, u.values())) for m, u in moments.items()]))
    return {"sizes": usages}

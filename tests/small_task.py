"""The additions of the demo with few prompts: a run encodes all of them, and trains on a few."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from realign.demo.arithmetic import prepare
from realign.demo.tiny import Task


def small_task(folder: Path) -> Task:
    """Write the task; of its 8,085 prompts keep 200. Encoding all of them takes a second per run."""
    task = prepare(folder, seed=0, demonstrations=64, held_out=16)
    task.prompts.write_text("".join(task.prompts.read_text().splitlines(keepends=True)[:200]))
    return task


def recorded(folder: Path, step: int) -> dict[str, Any]:
    """Return the metrics of a step of a run."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return next(line for line in lines if line["step"] == step)

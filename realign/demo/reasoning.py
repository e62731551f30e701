"""Task of `make llm`: short sums from reasoning-gym as JSONL files of prompts.

    python -m realign.demo.reasoning [folder] [seed]

Each row has the columns `prompt`, `answer`, `task` and `metadata`, which the rewards of `realign.rewards.reasoning`
need. No held-out question is among the training questions.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

from realign.demo.tiny import write_rows
from realign.errors import ConfigError

TASK = "chain_sum"
SETTINGS = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
"""Sums and differences of two or three numbers of one digit."""
DRAWN = 3000
"""Number of questions drawn. Some occur several times, because there are only about 160 sums of two digits."""


class Task(NamedTuple):
    """Paths of the files of the task."""

    train: Path
    held_out: Path

    @classmethod
    def of(cls, folder: Path) -> Task:
        """Return the paths of the files that `prepare` writes to `folder`."""
        return cls(folder / "train.jsonl", folder / "held_out.jsonl")


def prepare(folder: Path, *, seed: int, held_out: int = 100) -> Task:
    """Write training and held-out questions.

    Args:
        folder: Output folder.
        seed: Seed of the questions.
        held_out: Number of held-out questions.

    Raises:
        ConfigError: reasoning-gym is not installed.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError("the task needs the package reasoning-gym: pip install 'realign-rl[tasks]'") from error
    entries = reasoning_gym.create_dataset(TASK, seed=seed, size=DRAWN, **SETTINGS)
    rows = [_row(entry) for entry in entries]
    asked = dict(list({row["prompt"]: row for row in rows}.items())[:held_out])
    task = Task.of(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(task.held_out, asked.values())
    write_rows(task.train, [row for row in rows if row["prompt"] not in asked])
    return task


def _row(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt": entry["question"],
        "answer": entry["answer"],
        "task": TASK,
        "metadata": {"source_dataset": TASK, "source_index": entry["metadata"]["source_index"]},
    }


if __name__ == "__main__":
    folder, seed = (sys.argv[1:] + ["runs/reasoning", "0"][len(sys.argv) - 1 :])[:2]
    for name, path in prepare(Path(folder), seed=int(seed))._asdict().items():
        print(f"{name}: {path}")

"""Task of `make llm` and of the tutorial: short sums from reasoning-gym as JSONL files.

    python -m realign.demo.reasoning [folder] [seed]

Prompts have the columns `prompt`, `answer`, `task` and `metadata`, which the rewards of `realign.rewards.reasoning`
need. Demonstrations are conversations (`messages`), and pairs are a prompt with a right and a wrong answer, all as chat
messages. No held-out question is in the other files.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from realign.demo.tiny import write_rows
from realign.errors import ConfigError

TASK = "chain_sum"
SETTINGS = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
"""Sums and differences of two or three numbers of one digit."""
DRAWN = 3000
"""Number of questions drawn. Some occur several times, because there are only about 160 sums of two digits."""


class ReasoningTask(NamedTuple):
    """Paths of the files of the task."""

    train: Path
    """Prompts to train on."""
    held_out: Path
    """Prompts to evaluate on."""
    demonstrations: Path
    """Conversations with right answers, for SFT."""
    pairs: Path
    """A right and a wrong answer to each question, for DPO."""

    @classmethod
    def of(cls, folder: Path) -> ReasoningTask:
        """Return the paths of the files that `prepare` writes to `folder`."""
        return cls(*(folder / f"{name}.jsonl" for name in cls._fields))


def prepare(folder: Path, *, seed: int, held_out: int = 200) -> ReasoningTask:
    """Write prompts, demonstrations and preference pairs.

    Args:
        folder: Output folder.
        seed: Seed of the questions.
        held_out: Number of held-out questions.

    Raises:
        ConfigError: reasoning-gym is not installed.
    """
    rows = questions(TASK, seed=seed, size=DRAWN, **SETTINGS)
    train, asked = split(rows, held_out)
    task = ReasoningTask.of(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(task.held_out, asked)
    write_rows(task.train, train)
    write_rows(task.demonstrations, ({"messages": [*_question(row), _answer(row["answer"])]} for row in train))
    rng = random.Random(seed)
    write_rows(task.pairs, (_pair(row, rng) for row in train))
    return task


def questions(task: str, *, seed: int, size: int, **settings: int) -> list[dict[str, Any]]:
    """Return rows of a task of reasoning-gym, for the rewards of `realign.rewards.reasoning`; some may repeat.

    Raises:
        ConfigError: reasoning-gym is not installed.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError("the task needs the package reasoning-gym: pip install 'realign-rl[tasks]'") from error
    return [
        {
            "prompt": entry["question"],
            "answer": entry["answer"],
            "task": task,
            "metadata": {"source_dataset": task, "source_index": entry["metadata"]["source_index"]},
        }
        for entry in reasoning_gym.create_dataset(task, seed=seed, size=size, **settings)
    ]


def split(rows: Sequence[dict[str, Any]], held_out: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows to train on, and the first `held_out` different questions, none of which is among them."""
    asked = dict(list({row["prompt"]: row for row in rows}.items())[:held_out])
    return [row for row in rows if row["prompt"] not in asked], list(asked.values())


def _pair(row: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    wrong = int(row["answer"]) + rng.choice((-2, -1, 1, 2))
    return {"prompt": _question(row), "chosen": [_answer(row["answer"])], "rejected": [_answer(str(wrong))]}


def _question(row: dict[str, Any]) -> list[dict[str, str]]:
    return [{"role": "user", "content": row["prompt"]}]


def _answer(number: str) -> dict[str, str]:
    return {"role": "assistant", "content": f"The answer is {number}."}


if __name__ == "__main__":
    folder, seed = (sys.argv[1:] + ["runs/reasoning", "0"][len(sys.argv) - 1 :])[:2]
    for name, path in prepare(Path(folder), seed=int(seed))._asdict().items():
        print(f"{name}: {path}")

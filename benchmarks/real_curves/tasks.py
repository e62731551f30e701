"""Three tasks of reasoning-gym, their files, and the rewards that read an answer out of a sentence."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realign.demo.reasoning import questions, split
from realign.demo.tiny import write_rows
from realign.rewards.reasoning import last_number, verified

DRAWN = 4000
"""Number of questions drawn, of which some occur several times."""
HELD_OUT, DEMONSTRATIONS = 200, 160
YES_OR_NO = re.compile(r"\b(yes|no)\b", re.IGNORECASE)


def first_verdict(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return 1.0 if the verifier of the task accepts the first yes or no of the response, else 0.0."""
    verdict = YES_OR_NO.search(response)
    return float(verdict is not None and verified(prompt, verdict[0].capitalize(), row) == 1.0)


def exact(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return 1.0 if the verifier of the task accepts the whole response, else 0.0."""
    return float(verified(prompt, response, row) == 1.0)


@dataclass(frozen=True)
class Task:
    """A task of reasoning-gym with the settings of this study."""

    title: str
    dataset: str
    """Name in reasoning-gym."""
    reward: Callable[[str, str, dict[str, Any]], float]
    max_new_tokens: int
    settings: Mapping[str, int] = field(default_factory=dict)

    @property
    def reward_path(self) -> str:
        """Import path of the reward function."""
        return f"{self.reward.__module__}:{self.reward.__name__}"


TASKS: Mapping[str, Task] = {
    "sums": Task(
        "Sums of two or three numbers",
        "chain_sum",
        last_number,
        16,
        {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    ),
    "syllogisms": Task("Syllogisms: yes or no", "syllogism", first_verdict, 8),
    "reversal": Task(
        "Three words in reverse order", "word_sequence_reversal", exact, 12, {"min_words": 3, "max_words": 3}
    ),
}


def prepare(name: str, folder: Path, *, held_out: int = HELD_OUT) -> None:
    """Write `train.jsonl`, `held_out.jsonl` and `demonstrations.jsonl` of a task; held-out questions are in no other.

    Raises:
        ConfigError: reasoning-gym is not installed.
    """
    task = TASKS[name]
    rows = questions(task.dataset, seed=0, size=DRAWN, **task.settings)
    train, asked = split(rows, held_out)
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "train.jsonl", train)
    write_rows(folder / "held_out.jsonl", asked)
    shown = list({row["prompt"]: row for row in train}.values())[:DEMONSTRATIONS]
    write_rows(
        folder / "demonstrations.jsonl",
        (
            {
                "messages": [
                    {"role": "user", "content": row["prompt"]},
                    {"role": "assistant", "content": row["answer"]},
                ]
            }
            for row in shown
        ),
    )


def best_constant(name: str, train: Sequence[dict[str, Any]], held_out: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the most frequent right answer to the training questions, and its share of right held-out answers."""
    answer, _ = Counter(row["answer"] for row in train).most_common(1)[0]
    right = [TASKS[name].reward(row["prompt"], answer, row) for row in held_out]
    return {"task": name, "constant": answer, "share": round(sum(right) / len(right), 4)}

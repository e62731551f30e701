"""Custom reward function in one file: 1 for the right sum, 0.5 for an error of 1, None for a response without a number.

Run it from the repository root:

    realign experiment=grpo_arithmetic interfaces.reward.function=examples/close_answer.py:score
"""

from __future__ import annotations

from typing import Any


def score(prompt: str, response: str, row: dict[str, Any]) -> float | None:
    """Score a response to `prompt`; `row` is the dataset row of the prompt."""
    if not response.isdecimal():
        return None  # no reward: the response is excluded from the loss and its group's statistics
    distance = abs(int(response) - int(row["answer"]))
    return 1.0 if distance == 0 else 0.5 if distance == 1 else 0.0

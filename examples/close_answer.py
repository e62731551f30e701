"""A reward of one's own, in one file: full marks for the right sum, half for a near miss, None for no number at all.

Run it from the folder above:

    realign experiment=grpo_arithmetic interfaces.reward.function=examples/close_answer.py:score
"""

from __future__ import annotations

from typing import Any


def score(prompt: str, response: str, row: dict[str, Any]) -> float | None:
    """Judge a response to `prompt`; `row` is the row of the dataset that the prompt came from."""
    if not response.isdecimal():
        return None  # no verdict: the response leaves the loss and its group's statistics
    distance = abs(int(response[::-1]) - int(row["answer"][::-1]))  # the task writes numbers from their units on
    return 1.0 if distance == 0 else 0.5 if distance == 1 else 0.0

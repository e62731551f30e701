"""Rewards of the tasks of reasoning-gym, by its own verifiers (needs the extra `tasks`).

A row of the data has the columns `task` (name of the task in reasoning-gym), `answer` and `metadata`, as
`realign.demo.reasoning` writes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from realign.cells import answers_of
from realign.errors import ConfigError

BRIEF = 24
"""Largest number of characters of a response that `brief` gives the full reward."""
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def verified(prompt: str, response: str, row: dict[str, Any]) -> float | None:
    """Return the score of the whole response by the verifier of the task, from 0 to 1; None without an answer.

    Most verifiers of reasoning-gym give 1 for the answer alone, and a small score for a text that contains it.

    Raises:
        ConfigError: reasoning-gym is not installed.
    """
    entry = {"question": row["prompt"], "metadata": row.get("metadata", {})}
    score, answers = _verifier(str(row["task"])), answers_of(row["answer"])
    return max((float(score(response.strip(), {**entry, "answer": answer})) for answer in answers), default=None)


def last_number(prompt: str, response: str, row: dict[str, Any]) -> float | None:
    """Return 1.0 if the verifier of the task accepts the last number of the response, else 0.0; None without an answer.

    Small models answer in sentences. Text around the number does not change the score.

    Raises:
        ConfigError: reasoning-gym is not installed.
    """
    numbers = NUMBER.findall(response)
    if not numbers:
        return 0.0 if answers_of(row["answer"]) else None
    score = verified(prompt, numbers[-1], row)
    return None if score is None else float(score == 1.0)


def brief(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return 1.0 for a response of at most 24 characters, and less for a longer one: 24 divided by its length."""
    return min(1.0, BRIEF / max(len(response.strip()), 1))


@lru_cache
def _verifier(task: str) -> Callable[[str, dict[str, Any]], float]:
    try:
        from reasoning_gym import get_score_answer_fn
    except ImportError as error:
        raise ConfigError(
            "realign.rewards.reasoning needs the package reasoning-gym: pip install 'realign-rl[tasks]'"
        ) from error
    return get_score_answer_fn(task)

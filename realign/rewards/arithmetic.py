"""Verifiable reward of the arithmetic demo."""

from __future__ import annotations

from typing import Any

from realign.cells import answers_of


def exact_answer(prompt: str, response: str, row: dict[str, Any]) -> float | None:
    """Return 1.0 if the response, without surrounding whitespace, is an answer of `row["answer"]`, else 0.0.

    Returns None (no reward) if the row has no answer (`realign.cells.answers_of`).
    """
    answers = answers_of(row["answer"])
    return float(response.strip() in answers) if answers else None

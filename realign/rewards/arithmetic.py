"""The verifiable reward of the arithmetic demo."""

from __future__ import annotations

from typing import Any


def exact_answer(prompt: str, response: str, row: dict[str, Any]) -> float:
    """1.0 if the response, stripped of surrounding blanks, is the text of `row["answer"]`, else 0.0."""
    return 1.0 if response.strip() == str(row["answer"]) else 0.0

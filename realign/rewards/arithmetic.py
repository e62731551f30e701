"""Verifiable reward of the arithmetic demo."""

from __future__ import annotations

from typing import Any


def exact_answer(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return 1.0 if the response, without surrounding whitespace, equals `str(row["answer"])`, else 0.0."""
    return 1.0 if response.strip() == str(row["answer"]) else 0.0

"""Rewards for the format `<think>...</think><answer>...</answer>` (arXiv:2501.12948) and for the answer in it."""

from __future__ import annotations

import re
from typing import Any

from realign.cells import answers_of

_FORM = re.compile(r"\s*<think>(?P<think>.*?)</think>\s*<answer>(?P<answer>.*?)</answer>\s*", re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def well_formed(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return 1.0 if the response is one thought and one answer in their tags, without any other text, else 0.0.

    Each tag must occur exactly once. If the prompt ends with `<think>`, the response must not repeat that tag.
    """
    return float(_answer(prompt, response) is not None)


def tagged_answer(prompt: str, response: str, row: dict[str, Any]) -> float | None:
    """Return 1.0 if the response is well formed and has an answer of `row["answer"]`, else 0.0.

    Returns None (no reward) if the row has no answer (`realign.cells.answers_of`).
    """
    answers = answers_of(row["answer"])
    return float(_answer(prompt, response) in answers) if answers else None


def _answer(prompt: str, response: str) -> str | None:
    text = "<think>" + response if prompt.rstrip().endswith("<think>") else response
    match = _FORM.fullmatch(text)
    if match is None or any(text.count(tag) != 1 for tag in _TAGS):
        return None
    return match["answer"].strip()

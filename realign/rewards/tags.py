"""Rewards for the format `<think>...</think><answer>...</answer>` (arXiv:2501.12948) and for the answer in it."""

from __future__ import annotations

import re
from typing import Any

_FORM = re.compile(r"\s*<think>(?P<think>.*?)</think>\s*<answer>(?P<answer>.*?)</answer>\s*", re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def well_formed(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return 1.0 if the response is one thought and one answer in their tags, without any other text, else 0.0.

    Each tag must occur exactly once. If the prompt ends with `<think>`, the response must not repeat that tag.
    """
    return float(_answer(prompt, response) is not None)


def tagged_answer(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return 1.0 if the response is well formed and its stripped answer equals `str(row["answer"])`, else 0.0."""
    return float(_answer(prompt, response) == str(row["answer"]))


def _answer(prompt: str, response: str) -> str | None:
    text = "<think>" + response if prompt.rstrip().endswith("<think>") else response
    match = _FORM.fullmatch(text)
    if match is None or any(text.count(tag) != 1 for tag in _TAGS):
        return None
    return match["answer"].strip()

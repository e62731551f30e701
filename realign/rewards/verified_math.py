"""Verifiable reward that compares mathematical answers by value, with math-verify (needs the extra `math`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from realign.cells import answers_of
from realign.errors import ConfigError

_DOLLAR = "\\$"
"""A dollar of money in LaTeX, which is no mark around a formula."""


def same_value(prompt: str, response: str, row: dict[str, Any]) -> float | None:
    """Return 1.0 if the last answer in the response (in a box, else in the text) equals `row["answer"]`, else 0.0.

    `row["answer"]` may be a number, or LaTeX with or without dollar signs or a box, or a list of them
    (`realign.cells.answers_of`). An escaped dollar, of money, does not count. Returns None (no reward) if the row
    has no answer, or none that can be parsed as mathematics.

    Raises:
        ConfigError: math-verify is not installed.
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ConfigError(
            "realign.rewards.verified_math needs the package math-verify: pip install 'realign-rl[math]'"
        ) from error
    # math-verify's own timeouts raise outside the main thread, so they are disabled: the reward workers have a
    # deadline. Its warnings about disabled timeouts are silenced.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    golds = [gold for text in answers_of(row["answer"]) if (gold := _parse(text, parse))]
    if not golds:
        return None
    given = parse(response.replace(_DOLLAR, ""), parsing_timeout=None)
    return float(any(verify(gold, given, timeout_seconds=None) for gold in golds))


def _parse(answer: str, parse: Callable[..., list[Any]]) -> list[Any]:
    """Return an answer as mathematics; empty if it is none."""
    text = answer.replace(_DOLLAR, "")
    delimited = any(mark in text for mark in ("$", "\\boxed", "\\[", "\\("))
    return parse(text if delimited else f"${text}$", parsing_timeout=None)

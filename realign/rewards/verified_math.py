"""Verifiable reward that compares mathematical answers by value, with math-verify (needs the extra `math`)."""

from __future__ import annotations

import logging
from typing import Any

from realign.errors import ConfigError


def same_value(prompt: str, response: str, row: dict[str, Any]) -> float | None:
    """Return 1.0 if the last answer in the response (in a box, else in the text) equals `row["answer"]`, else 0.0.

    `row["answer"]` may be a number, or LaTeX with or without dollar signs or a box. Returns None (no reward) if it
    cannot be parsed as mathematics.

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
    answer = str(row["answer"])
    delimited = any(mark in answer for mark in ("$", "\\boxed", "\\[", "\\("))
    gold = parse(answer if delimited else f"${answer}$", parsing_timeout=None)
    if not gold:
        return None
    return float(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))

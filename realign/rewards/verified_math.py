"""Mathematical answers compared by value, not by text, with math-verify (extra `math`)."""

from __future__ import annotations

import logging
from typing import Any


def same_value(prompt: str, response: str, row: dict[str, Any]) -> float | None:
    """1.0 if the last answer in the response (in a box, else in text) equals `row["answer"]`, else 0.0.

    The answer may be a number, or LaTeX with or without dollars or a box. None, no verdict, if it cannot be read as
    mathematics: then every response would be wrong.

    Raises:
        ImportError: math-verify is not installed.
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ImportError("realign.rewards.verified_math needs math-verify: pip install 'realign[math]'") from error
    # Its own limits raise outside of main threads; the reward workers have a deadline, and it warns that it has none.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    answer = str(row["answer"])
    delimited = any(mark in answer for mark in ("$", "\\boxed", "\\[", "\\("))
    gold = parse(answer if delimited else f"${answer}$", parsing_timeout=None)
    if not gold:
        return None
    return float(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))

"""Format messages that contain model output or tracebacks, and find texts with too many tokens."""

from __future__ import annotations

import logging
import os
import re
import unicodedata
from typing import Any

# Control, format (bidirectional overrides, zero-width), surrogate, line separator and paragraph separator characters.
_INVISIBLE = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))


def visible(text: str) -> str:
    """Escape characters that change how a terminal shows the text around them, except tabs and newlines.

    These are control and format characters, line and paragraph separators, and surrogates.
    """
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in _INVISIBLE else repr(c)[1:-1] for c in text)


def shorten(text: str, longest: int) -> str:
    """Return the text with at most `longest` characters of its start and end; the middle is replaced by a count."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters omitted) ... {text[-half:]}"


def brief(value: Any, longest: int) -> str:
    """Return the `repr` of a value, cut after `longest` characters."""
    text = repr(value)
    return text if len(text) <= longest else f"{text[:longest]}..."


def first_line(error: BaseException) -> str:
    """Return the first line of the text of an error, or the name of its class if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


_USER = re.compile(r"(?<=://)[^\s/@]+@")


def for_terminal(text: str) -> str:
    """Return a text as `visible` shows it, without users and passwords of URLs.

    A text of more than 20,000 characters loses its middle.
    """
    return visible(_USER.sub("***@", shorten(text, 20_000)))


def headline(message: str) -> str:
    """Return the line of a failure message that names the failure: the exception of a traceback, or the first line."""
    lines = message.splitlines()
    frames = [i for i, line in enumerate(lines) if line.startswith('  File "')]
    following = lines[frames[-1] + 1 :] if frames else lines
    return next((line for line in following if line.strip() and not line.startswith(" ")), message)


def log_file(logger: logging.Logger) -> str:
    """Return the path of the file that a logger writes to, such as `runs/grpo/realign.log`; "the log" without one."""
    ancestor: logging.Logger | None = logger
    while ancestor is not None:
        for handler in ancestor.handlers:
            if isinstance(handler, logging.FileHandler) and handler.baseFilename != os.devnull:
                return handler.baseFilename
        ancestor = ancestor.parent if ancestor.propagate else None
    return "the log"


_SLACK = 256
"""Tokens by which a part must exceed the limit, since the cut may split a token into several."""


def part_over(tokenizer: Any, text: str, tokens: int, *, end: bool = False) -> str | None:
    """Return the beginning of a text if it alone has more than `tokens` tokens; None if the text may fit.

    Tokenizing costs about 300 bytes of memory per character, so a text of 50 MB must not be tokenized only to find out
    that it is too long. A small limit in characters would be wrong for tokenizers that skip whitespace or join unknown
    characters. So this tokenizes 8 characters per token of the limit, then twice as many, until there are enough. More
    than a million characters and 128 per token are always too many.

    Args:
        tokenizer: Tokenizer of transformers.
        text: The text.
        tokens: Maximum number of tokens.
        end: Return the end of the text instead.

    Raises:
        TypeError: the tokenizer cannot encode the text.
    """
    size = 8 * tokens + 4096
    if len(text) > 128 * tokens + 1_000_000:
        return text[-size:] if end else text[:size]
    while size < len(text):
        part = text[-size:] if end else text[:size]
        if len(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]) > tokens + _SLACK:
            return part
        size *= 2
    return None

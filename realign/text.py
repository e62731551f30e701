"""Format messages that contain model output or tracebacks."""

from __future__ import annotations

import logging
import os
import unicodedata

# Control, format (bidirectional overrides, zero-width), surrogate, line separator and paragraph separator characters.
_INVISIBLE = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))


def visible(text: str) -> str:
    """Escape characters that change how a terminal shows the text around them, except tabs and newlines.

    These are control and format characters, line and paragraph separators, and surrogates.
    """
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in _INVISIBLE else repr(c)[1:-1] for c in text)


def shortened(text: str, longest: int) -> str:
    """Return the text with at most `longest` characters of its start and end; the middle is replaced by a count."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters omitted) ... {text[-half:]}"


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

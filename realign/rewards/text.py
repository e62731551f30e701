"""Format messages that contain model output or tracebacks."""

from __future__ import annotations

import unicodedata


def visible(text: str) -> str:
    """Escape control characters, except tabs and newlines, so that a terminal does not interpret them."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else repr(c)[1:-1] for c in text)


def headline(message: str) -> str:
    """Return the line of a failure message that names the failure: the exception of a traceback, or the first line."""
    lines = message.splitlines()
    frames = [i for i, line in enumerate(lines) if line.startswith('  File "')]
    following = lines[frames[-1] + 1 :] if frames else lines
    return next((line for line in following if line.strip() and not line.startswith(" ")), message)

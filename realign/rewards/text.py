"""Escape model output before it is printed to a terminal."""

from __future__ import annotations

import unicodedata


def visible(text: str) -> str:
    """Escape control characters, except tabs and newlines, so that a terminal does not interpret them."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else repr(c)[1:-1] for c in text)

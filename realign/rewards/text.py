"""Text that a model may have written, on its way to a screen."""

from __future__ import annotations

import unicodedata


def visible(text: str) -> str:
    """The text without what a terminal would obey: control characters, but for tabs and line ends, are written out."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else repr(c)[1:-1] for c in text)

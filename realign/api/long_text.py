"""`part_over`: find out that a text has too many tokens, without tokenizing all of it."""

from __future__ import annotations

from typing import Any

_SLACK = 256
"""Tokens by which a part must exceed the limit, since the cut may split a token into several."""


def part_over(tokenizer: Any, text: str, tokens: int, *, end: bool = False) -> str | None:
    """Return the beginning of a text if it alone has more than `tokens` tokens; None if the text may fit.

    Tokenizing costs about 300 bytes of memory per character, so a text of 50 MB must not be tokenized only to find out
    that it is too long. A limit in characters would be wrong for tokenizers that skip whitespace or join unknown
    characters. So this tokenizes 8 characters per token of the limit, then twice as many, until there are enough.

    Args:
        tokenizer: Tokenizer of transformers.
        text: The text.
        tokens: Maximum number of tokens.
        end: Return the end of the text instead.

    Raises:
        TypeError: the tokenizer cannot encode the text.
    """
    size = 8 * tokens + 4096
    while size < len(text):
        part = text[-size:] if end else text[:size]
        if len(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]) > tokens + _SLACK:
            return part
        size *= 2
    return None


__all__ = ["part_over"]

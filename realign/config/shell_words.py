"""Prepare the words of a command line for Hydra: quote text that its grammar cannot read, and choose YAML files.

Hydra reads letters outside ASCII, spaces and parentheses only in quotes. A shell removes one pair of quotes, so users
would have to write two.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from realign.config.files import EXPERIMENT, is_path

_PLAIN_KEY = re.compile(r"[+~]{0,2}[\w@./:-]+")
_SPECIAL = re.compile(r"""[,'"\[\]{}\\]|\$\{""")
"""Characters whose meaning in Hydra's grammar (lists, mappings, quotes, interpolations) a user may have intended."""


def prepare(overrides: Sequence[str]) -> list[str]:
    """Return the overrides with quotes added where needed, and with YAML files as experiments."""
    return [quoted(with_file(word)) for word in overrides]


def quoted(word: str) -> str:
    """Return an override whose value Hydra reads as text, with quotes if Hydra's grammar needs them.

    A value with commas, brackets, quotes or interpolations stays unchanged, since it may be a list or a sweep.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, equals, value = word.partition("=")
    if not equals or not value.strip() or not _PLAIN_KEY.fullmatch(key) or _SPECIAL.search(value):
        return word
    try:
        OverridesParser.create().parse_override(word)
    except HydraException:
        return f'{key}="{value}"'
    return word


def quoted_text(value: str) -> str:
    """Return a text in the quotes of Hydra's grammar, as the value of an override. Interpolations stay in effect."""
    # Hydra reads a backslash as an escape only before a quote
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return f"'{escaped}'"


def is_file(word: str) -> bool:
    """Return whether a word is the path of a YAML file instead of an override."""
    return "=" not in word and is_path(word)


def with_file(word: str) -> str:
    """Return `experiment='FILE'` for `./my.yaml` and `experiment=./my.yaml`, and other words unchanged."""
    key, _, value = word.partition("=") if not is_file(word) else (EXPERIMENT, "=", word)
    files = value.split(",")
    if key.lstrip("+") != EXPERIMENT or value[:1] in ("'", '"') or not all(map(is_path, files)):
        return word
    return f"{key}={','.join(map(quoted_text, files))}"


__all__ = ["is_file", "prepare", "quoted", "quoted_text", "with_file"]

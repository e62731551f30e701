"""Read columns of a row by name, and recognize which columns a row has."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from realign.errors import DataError

Row: TypeAlias = dict[str, Any]

CONVERSATIONS = ("messages", "conversations", "conversation")
"""Columns with whole conversations."""
RESPONSES = ("completion", "response")
"""Columns with the response to a prompt."""


def read_column(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column.

    Args:
        row: A row of data.
        name: Name of the column. `question.text` and `answers.0` select an item of an object or list in a column, and
            `answers.*.text` selects an item of every element of a list.

    Raises:
        DataError: the row lacks the column; names its columns and the nearest one.
    """
    try:
        # The whole name first, since the name of a column may contain a period.
        return row[name] if name in row else _part(row, name.split("."))
    except (KeyError, IndexError, TypeError, ValueError):
        near = difflib.get_close_matches(name, row, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DataError(f"no column {name!r}; found {sorted(row)}{hint}") from None


def _part(value: Any, path: list[str]) -> Any:
    for place, name in enumerate(path):
        if name == "*" and isinstance(value, list):
            return [_part(item, path[place + 1 :]) for item in value]
        value = value[int(name)] if isinstance(value, list) else value[name]
    return value


def only_one(row: Mapping[str, Any], names: Iterable[str], setting: str) -> str | None:
    """Return the one column among `names` that the row has, or None if it has none of them.

    Raises:
        DataError: the row has several of them; names the setting that selects one.
    """
    present = [name for name in names if name in row]
    if len(present) > 1:
        raise DataError(f"found the columns {present}. Set {setting} to one of them.")
    return present[0] if present else None


def overlap(columns: Mapping[str, str | None]) -> str | None:
    """Return a message if one of two columns contains the other, such as `messages` and `messages.1.content`."""
    given = [(setting, name) for setting, name in columns.items() if name is not None]
    for setting, name in given:
        for other, outer in given:
            if setting != other and (name == outer or name.startswith(f"{outer}.")):
                return f"{setting}={name!r}: it is part of {other}={outer!r}. Use different columns."
    return None

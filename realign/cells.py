"""Cells of a row of data: find one by its path, and read the answers that one accepts."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from contextlib import suppress
from numbers import Number
from typing import Any

from realign.errors import DataError


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


def answers_of(cell: Any) -> list[str]:
    """Return the texts of all answers that a cell accepts; none if it is null, NaN, empty or blank.

    A number that pandas made a float has two texts, such as 4 and 4.0. A list has several accepted answers. Numbers and
    arrays may be those of numpy, pandas and torch.

    Raises:
        DataError: the cell is an object, or a list of several numbers, which may be one answer or several.
    """
    if cell is None or type(cell).__name__ in ("NAType", "NaTType"):  # of pandas
        return []
    if isinstance(cell, str | bytes):
        text = (cell if isinstance(cell, str) else cell.decode(errors="replace")).strip()
        return [text] if text else []
    if isinstance(cell, Mapping):
        raise DataError(f"the answer is an object with the keys {', '.join(map(str, cell))}. Name one, as COLUMN.KEY.")
    value = cell.tolist() if hasattr(cell, "tolist") else cell
    if value is not cell and not isinstance(value, Number):
        return answers_of(value)
    if isinstance(value, list | tuple | set | frozenset):
        given = [answers for answers in map(answers_of, value) if answers]
        if len(given) > 1 and all(isinstance(item, Number | None) for item in value):
            raise DataError(
                f"the answer {value} is one answer of several numbers, or several answers. Write it as text."
            )
        return list(dict.fromkeys(text for answers in given for text in answers))
    if isinstance(value, bool):
        return [str(value), str(value).lower()]
    if not isinstance(value, Number):
        return [str(cell)]
    with suppress(TypeError, OverflowError):  # a complex number, or an integer beyond all floats
        if math.isnan(value):  # type: ignore[arg-type]
            return []
    # numpy prints the digits of a number in its own precision, torch prints the name of the class
    texts = [str(cell if isinstance(cell, Number) else value)]
    with suppress(TypeError, ValueError, OverflowError):
        if int(value) == value:  # type: ignore[call-overload]
            texts = [str(int(value)), *texts]  # type: ignore[call-overload]
    return list(dict.fromkeys(texts))

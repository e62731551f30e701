"""Read rows from a JSONL, JSON or parquet file, or from a folder written by `datasets`' `save_to_disk`."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from realign.data.columns import Row, read_column
from realign.errors import DataError


@dataclass(frozen=True, eq=False)
class Table:
    """The rows of one file, with the position of each row in the file.

    Attributes:
        path: Path of the file or folder.
        rows: The rows, one dictionary each.
        places: Position of each row in its file, from 1.
        unit: Unit of the positions: "line" or "row".
        dropped: Number of dropped rows of the file by reason.
    """

    path: Path
    rows: Sequence[Row]
    places: Sequence[int]
    unit: str
    dropped: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, index: int) -> str:
        """Return file and line (or row) of the row at `index`, for messages."""
        return f"{self.path}, {self.unit} {self.places[index]}"

    def column(self, name: str) -> list[Any]:
        """Return the values of a column.

        Args:
            name: Name of the column, or path to an item in it; see `read_column`.

        Raises:
            DataError: a row lacks the column; names the row, its columns and the nearest one.
        """
        values = []
        for index, row in enumerate(self.rows):
            try:
                values.append(read_column(row, name))
            except DataError as error:
                raise DataError(f"{self.where(index)}: {error}") from error
        return values


def read_rows(path: str | Path, limit: int | None = None) -> Table:
    """Read rows into memory.

    Args:
        path: Path of a `.jsonl`, `.json` or `.parquet` file, or of the folder of one split written by `datasets`'
            `save_to_disk`. Blank lines of `.jsonl` files are skipped. A `.json` file contains a list of objects.
        limit: Maximum number of rows to read, from the start of the file; None reads all rows.

    Raises:
        DataError: the path does not exist, its format is unknown, a row is malformed (names its line), or the file
            contains no row.
    """
    file = Path(os.path.expanduser(path))  # leaves ~name unchanged if no such user exists
    readers: dict[str, Callable[[Path, int | None], Table]] = {
        ".jsonl": _read_jsonl,
        ".json": _read_json,
        ".parquet": _read_parquet,
    }
    try:
        there = file.is_file() or file.is_dir()
    except OSError as error:  # for example, the name is too long
        raise DataError(f"no file or folder {_short(path)}: {error.strerror}") from error
    if not there:
        raise DataError(f"no file or folder {_short(path)}{_near_file(file)}")
    reader = _read_folder if file.is_dir() else readers.get(file.suffix.lower())
    if reader is None:
        found = f"unknown file type {file.suffix!r}" if file.suffix else "the file has no suffix"
        raise DataError(f"{path}: {found}. Supported: {', '.join(readers)}, or a folder written by `save_to_disk`.")
    try:
        table = reader(file, limit)
    except MemoryError as error:
        raise DataError(
            f"{path} ({file.stat().st_size:,} bytes): its rows need more memory than this process may use. Set limit "
            "to read fewer rows, or give the process more memory."
        ) from error
    if not table.rows:
        raise DataError(f"{path} contains no rows.")
    return table


def _short(path: str | Path) -> str:
    text = repr(str(path))
    return text if len(text) <= 300 else f"{text[:300]}..."


def _near_file(file: Path) -> str:
    folder = file.parent
    if file.exists():
        return "; the path is neither a file nor a folder"
    if not folder.is_dir():
        return f"; the folder {str(folder)!r} does not exist"
    near = difflib.get_close_matches(file.name, [p.name for p in folder.iterdir()], n=1)
    return f"; did you mean {str(folder / near[0])!r}?" if near else ""


def _read_jsonl(file: Path, limit: int | None) -> Table:
    rows: list[Row] = []
    places: list[int] = []
    with file.open("rb") as lines:
        for place, line in enumerate(lines, 1):
            if limit is not None and len(rows) == limit:
                break
            if not line.strip():
                continue
            rows.append(_checked(_parsed(line, f"{file}, line {place}"), f"{file}, line {place}"))
            places.append(place)
    return Table(file, rows, places, "line")


def _read_json(file: Path, limit: int | None) -> Table:
    content = _parsed(file.read_bytes(), str(file), ". A file with one row per line needs the suffix .jsonl.")
    if not isinstance(content, list):
        raise DataError(f"{file} contains a {type(content).__name__}; expected a list of objects.")
    return _numbered(file, [_checked(row, f"{file}, row {place}") for place, row in enumerate(content[:limit], 1)])


def _parsed(data: bytes, where: str, if_more: str = "") -> Any:
    """Parse JSON, and reject text that UTF-8 cannot encode, such as an unpaired surrogate escape.

    Args:
        data: Content of the file, or of one line.
        where: File and line, for messages.
        if_more: Text to append to the error when further data follows the JSON value.
    """
    try:
        found = json.loads(data)
        if b"\\u" in data:
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # invalid syntax, encoding or nesting depth
        raise DataError(f"{where} is not valid JSON: {error}{if_more if 'Extra data' in str(error) else ''}") from error
    return found


def _read_parquet(file: Path, limit: int | None) -> Table:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            rows = (row for batch in parquet.iter_batches() for row in batch.to_pylist())
            return _numbered(file, list(islice(rows, limit)))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{file} is not a readable parquet file: {error}") from error


def _read_folder(folder: Path, limit: int | None) -> Table:
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(p.name for p in folder.iterdir() if p.is_dir())
        raise DataError(f"{folder} contains several splits. Choose one: {', '.join(str(folder / s) for s in splits)}.")
    if not (folder / "state.json").is_file():
        found = sorted(p.name for p in folder.iterdir())[:8]
        raise DataError(f"{folder} is not a folder written by `save_to_disk`; it contains {found}.")
    import datasets

    try:
        dataset = datasets.load_from_disk(str(folder))
        rows = dataset if limit is None else dataset.select(range(min(limit, len(dataset))))
        return _numbered(folder, rows.with_format(None).to_list())
    except Exception as error:  # `datasets` raises various exceptions for missing or corrupt files
        raise DataError(f"{folder} cannot be read as a dataset: {type(error).__name__}: {error}") from error


def _numbered(file: Path, rows: list[Row]) -> Table:
    return Table(file, rows, range(1, len(rows) + 1), "row")


def _checked(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{where} contains a {type(row).__name__}; expected an object with columns.")
    return row

"""Binary files of rows: parquet, Arrow, and folders of the `datasets` library."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realign.data.columns import Row
from realign.data.row_files import (
    LARGEST_ROW,
    Cursor,
    LocalFile,
    PlacedRow,
    RowFile,
    largest_content,
    row_too_large,
    too_large,
)
from realign.errors import DataError

_BATCH = 100
"""Rows that are converted at a time. A few may be much larger in memory than in the file."""
_DAMAGED = (OSError, ValueError, OverflowError, SystemError)
"""Errors of values that Python cannot represent, such as a date in the year 50,000, besides those of pyarrow."""


class _Converter:
    """Converts batches of a file to rows, and checks them first.

    Args:
        name: Name of the file, for messages.
        size: Size of the file in bytes.
    """

    def __init__(self, name: str, size: int) -> None:
        self._name, self._most, self._total = name, largest_content(size), 0

    def rows(self, batch: Any, start: int = 0) -> Iterator[Row]:
        """Yield the rows of a record batch or table from a position.

        Raises:
            DataError: columns have the same name, or the rows are too large.
            ArrowInvalid: the batch is damaged. Reading it could end the process, or read other memory.
        """
        if twice := sorted({name for name in batch.schema.names if batch.schema.names.count(name) > 1}):
            raise DataError(f"{self._name} has several columns with the name {twice[0]!r}. Rename them.")
        batch.validate(full=True)
        for first in range(min(start, len(batch)), len(batch), _BATCH):
            for row in batch.slice(first, _BATCH).to_pylist():
                self._total += (size := _size(row))
                if size > LARGEST_ROW:
                    raise row_too_large(f"a row of {self._name}")
                if self._total > self._most:
                    raise too_large(self._name, self._most)
                yield row


def _size(value: Any) -> int:
    """Return about how many bytes a value has."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, list) and value and not isinstance(value[0], int | float):
        return sum(map(_size, value))
    return 8 * len(value) if isinstance(value, list) else 8


@dataclass(frozen=True)
class Parquet(LocalFile):
    """A parquet file. A position is the number of rows before it."""

    def rows(self, cursor: Cursor) -> Iterator[PlacedRow]:
        """See `RowFile`."""
        import pyarrow
        import pyarrow.parquet

        start = number = cursor.position or 0
        try:
            with pyarrow.parquet.ParquetFile(self.path) as file:
                sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
                first = 0
                while first < len(sizes) and start >= sizes[first]:
                    start -= sizes[first]
                    first += 1
                converter = _Converter(self.name, self.path.stat().st_size)
                for batch in file.iter_batches(_BATCH, row_groups=range(first, len(sizes))):
                    kept = batch.slice(min(start, len(batch)))
                    start -= len(batch) - len(kept)
                    for row in converter.rows(kept):
                        number += 1
                        cursor.position = number
                        yield PlacedRow(self, number, row)
        except (pyarrow.ArrowException, *_DAMAGED) as error:
            raise DataError(f"{self.name} is not a readable parquet file: {error}") from error


@dataclass(frozen=True)
class Arrow(LocalFile):
    """A file in the Arrow IPC file format or streaming format. A position is the number of rows before it."""

    def rows(self, cursor: Cursor) -> Iterator[PlacedRow]:
        """See `RowFile`."""
        import pyarrow

        start = number = cursor.position or 0
        try:
            with pyarrow.memory_map(str(self.path)) as file:
                converter = _Converter(self.name, self.path.stat().st_size)
                for batch in self._batches(file):
                    for row in converter.rows(batch, start):
                        number += 1
                        cursor.position = number
                        yield PlacedRow(self, number, row)
                    start -= min(start, len(batch))
        except (pyarrow.ArrowException, *_DAMAGED) as error:
            raise DataError(f"{self.name} is not a readable arrow file: {error}") from error

    def _batches(self, file: Any) -> Iterator[Any]:
        import pyarrow

        if file.read(6) == b"ARROW1":
            reader = pyarrow.ipc.open_file(file)
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            file.seek(0)
            yield from pyarrow.ipc.open_stream(file)


@dataclass(frozen=True)
class SavedFolder(RowFile):
    """A folder written by `datasets`' `save_to_disk`. A position is the number of rows before it."""

    path: Path

    @property
    def name(self) -> str:
        """See `RowFile`."""
        return str(self.path)

    def rows(self, cursor: Cursor) -> Iterator[PlacedRow]:
        """See `RowFile`."""
        import datasets

        try:
            for number, row in rows_of(datasets.load_from_disk(str(self.path)), cursor, self.name):
                yield PlacedRow(self, number, row)
        except DataError:
            raise
        except Exception as error:  # `datasets` raises various exceptions for missing or corrupt files
            raise DataError(f"{self.name} cannot be read as a dataset: {type(error).__name__}: {error}") from error

    def identity(self) -> str:
        """Return a hash of the state of the dataset and the sizes of its files."""
        digest = hashlib.sha256((self.path / "state.json").read_bytes())
        for file in sorted(self.path.glob("*.arrow")):
            digest.update(f"{file.name}:{file.stat().st_size}".encode())
        return digest.hexdigest()


def rows_of(dataset: Any, cursor: Cursor, name: str) -> Iterator[tuple[int, Row]]:
    """Yield number and row of the rows of a `datasets.Dataset` after a position, the number of rows before it."""
    number = cursor.position or 0
    size = sum(Path(file["filename"]).stat().st_size for file in dataset.cache_files) or dataset.data.nbytes
    tables, converter = dataset.with_format("arrow"), _Converter(name, size)
    for start in range(number, len(dataset), _BATCH):
        for row in converter.rows(tables[start : start + _BATCH]):
            number += 1
            cursor.position = number
            yield number, row

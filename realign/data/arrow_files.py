"""Binary files of rows: parquet, Arrow, and folders of the `datasets` library."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realign.data.columns import Row
from realign.data.row_files import Cursor, LocalFile, PlacedRow, RowFile
from realign.errors import DataError

_BATCH = 1000


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
                for batch in file.iter_batches(_BATCH, row_groups=range(first, len(sizes))):
                    kept = batch.slice(min(start, len(batch)))
                    start -= len(batch) - len(kept)
                    for row in kept.to_pylist():
                        number += 1
                        cursor.position = number
                        yield PlacedRow(self, number, row)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
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
                for batch in self._batches(file):
                    for first in range(min(start, len(batch)), len(batch), _BATCH):
                        for row in batch.slice(first, _BATCH).to_pylist():
                            number += 1
                            cursor.position = number
                            yield PlacedRow(self, number, row)
                    start -= min(start, len(batch))
        except (pyarrow.ArrowException, OSError, ValueError) as error:
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
            dataset = datasets.load_from_disk(str(self.path)).with_format(None)
            for number, row in rows_of(dataset, cursor):
                yield PlacedRow(self, number, row)
        except Exception as error:  # `datasets` raises various exceptions for missing or corrupt files
            raise DataError(f"{self.name} cannot be read as a dataset: {type(error).__name__}: {error}") from error

    def identity(self) -> str:
        """Return a hash of the state of the dataset and the sizes of its files."""
        digest = hashlib.sha256((self.path / "state.json").read_bytes())
        for file in sorted(self.path.glob("*.arrow")):
            digest.update(f"{file.name}:{file.stat().st_size}".encode())
        return digest.hexdigest()


def rows_of(dataset: Any, cursor: Cursor) -> Iterator[tuple[int, Row]]:
    """Yield number and row of the rows of a `datasets.Dataset` after a position, the number of rows before it."""
    number = cursor.position or 0
    for start in range(number, len(dataset), _BATCH):
        for row in dataset.select(range(start, min(start + _BATCH, len(dataset)))).to_list():
            number += 1
            cursor.position = number
            yield number, row

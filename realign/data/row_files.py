"""Sequences of rows that can be read from any position: files, and views of files."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

from realign.data.columns import Row, read_column
from realign.errors import DataError

Position: TypeAlias = Any
"""Position between two rows of a file, as a JSON value; None is the start."""

_EDGE = 65536
LARGEST_ROW = 2**28
"""Bytes that a row may have."""
_LARGEST_RATIO = 200
"""Bytes of rows per byte of a compressed file, in addition to `LARGEST_ROW`. Text has a ratio of 3 to 30."""


def largest_content(size: int) -> int:
    """Return how many bytes the rows of a compressed file of this size may have. More are an attack on the memory."""
    return LARGEST_ROW + _LARGEST_RATIO * size


def too_large(name: str, most: int) -> DataError:
    """Return the error of a compressed file with more than `most` bytes."""
    return DataError(
        f"{name} is a compressed file with more than {most // 2**20:,} MiB of rows, far more than text has. "
        "If this is right, store the rows as JSONL without compression."
    )


def row_too_large(where: str) -> DataError:
    """Return the error of a row with more than `LARGEST_ROW` bytes."""
    return DataError(f"{where} has more than {LARGEST_ROW // 2**20} MiB. Shorten it, or split it into several rows.")


class PlacedRow(NamedTuple):
    """A row with its place.

    Attributes:
        file: The file that contains the row.
        number: Number of the row or line in the file, from 1.
        row: The row.
    """

    file: RowFile
    number: int
    row: Row

    @property
    def where(self) -> str:
        """File and line (or row), for messages."""
        return self.file.where(self.number)


@dataclass
class Cursor:
    """Position of a reader, which moves behind each row that the reader yields.

    Attributes:
        position: The position.
        find: Returns the position, for readers that compute it on demand; None for others.
    """

    position: Position = None
    find: Callable[[], Position] | None = None

    def here(self) -> Position:
        """Return the position."""
        return self.position if self.find is None else self.find()


class RowFile(ABC):
    """A file, or another sequence of rows that can be read from any position."""

    unit: ClassVar[str] = "row"
    """Unit of the row numbers: "line" or "row"."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the file, for messages."""

    @abstractmethod
    def rows(self, cursor: Cursor) -> Iterator[PlacedRow]:
        """Yield the rows after the position of the cursor, and move the cursor.

        Raises:
            DataError: the file or a row is malformed; names the line.
        """

    @abstractmethod
    def identity(self) -> str:
        """Return a text that differs if the rows differ. Reads only a part of the file."""

    def leaves(self) -> list[RowFile]:
        """Return the files that this file consists of."""
        return [self]

    def where(self, number: int) -> str:
        """Return file and line (or row) of a row, for messages."""
        return f"{self.name}, {self.unit} {number}"


@dataclass(frozen=True)
class LocalFile(RowFile):
    """A file of this machine."""

    path: Path

    @property
    def name(self) -> str:
        """See `RowFile`."""
        return str(self.path)

    def identity(self) -> str:
        """Return the size, and a hash of the start and the end of the file."""
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            digest = hashlib.sha256(file.read(_EDGE))
            file.seek(max(0, size - _EDGE))
            digest.update(file.read(_EDGE))
        return f"{size}:{digest.hexdigest()}"


@dataclass(frozen=True)
class FirstRows(RowFile):
    """The first rows of several files, read one after another. A position is [file, position in it, rows before it].

    Attributes:
        files: The files.
        limit: Maximum number of rows.
        title: Name of the rows, for messages.
    """

    files: Sequence[RowFile]
    limit: int
    title: str

    @property
    def name(self) -> str:
        """See `RowFile`."""
        return self.title

    def rows(self, cursor: Cursor) -> Iterator[PlacedRow]:
        """See `RowFile`."""
        start, position, count = cursor.position or (0, None, 0)
        for index in range(start, len(self.files)):
            inner = Cursor(position)
            position = None
            for placed in self.files[index].rows(inner) if count < self.limit else ():
                count += 1
                cursor.position = [index, inner.here(), count]
                yield placed
                if count == self.limit:
                    return

    def identity(self) -> str:
        """See `RowFile`."""
        return f"{self.limit} of {[file.identity() for file in self.files]}"

    def leaves(self) -> list[RowFile]:
        """See `RowFile`."""
        return [leaf for file in self.files for leaf in file.leaves()]


@dataclass(frozen=True)
class WithColumns(RowFile):
    """A file with renamed columns.

    Attributes:
        file: The file.
        columns: Column of the file, or path to an item in it, by its new name.
    """

    file: RowFile
    columns: Mapping[str, str] = field(hash=False)

    @property
    def name(self) -> str:
        """See `RowFile`."""
        return self.file.name

    def rows(self, cursor: Cursor) -> Iterator[PlacedRow]:
        """See `RowFile`."""
        renamed = set(self.columns.values())
        for placed in self.file.rows(cursor):
            try:
                found = {new: read_column(placed.row, old) for new, old in self.columns.items()}
            except DataError as error:
                raise DataError(f"{placed.where}: columns: {error}") from error
            kept = {name: value for name, value in placed.row.items() if name not in renamed}
            yield placed._replace(row=kept | found)

    def identity(self) -> str:
        """See `RowFile`."""
        return f"{json.dumps(self.columns, sort_keys=True)} of {self.file.identity()}"

    def leaves(self) -> list[RowFile]:
        """See `RowFile`."""
        return self.file.leaves()

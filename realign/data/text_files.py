"""Text files of rows: JSON lines, JSON lists, CSV and TSV, also compressed with gzip."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

from realign.data.columns import Row
from realign.data.row_files import LARGEST_ROW, Cursor, LocalFile, PlacedRow, largest_content, row_too_large, too_large
from realign.errors import DataError

DELIMITERS = {",": "CSV", ";": "CSV with semicolons", "\t": "TSV"}
"""Delimiters of a file, and names of the formats."""


@dataclass(frozen=True)
class JsonLines(LocalFile):
    """A file with one JSON object per line. Blank lines are skipped. A position is [offset in bytes, line]."""

    unit: ClassVar[str] = "line"

    def rows(self, cursor: Cursor) -> Iterator[PlacedRow]:
        """See `RowFile`."""
        offset, number = cursor.position or (0, 0)
        with opened(self.path) as lines:
            lines.seek(offset)
            while line := lines.readline(LARGEST_ROW + 1):
                offset, number = offset + len(line), number + 1
                _check_size(line, self.where(number))
                if line.strip():
                    where = self.where(number)
                    row = _checked(_parsed(line, where), where)
                    cursor.position = [offset, number]
                    yield PlacedRow(self, number, row)


@dataclass(frozen=True)
class JsonList(LocalFile):
    """A file with one JSON list of objects. It is read as a whole. A position is the number of rows before it."""

    def rows(self, cursor: Cursor) -> Iterator[PlacedRow]:
        """See `RowFile`."""
        with opened(self.path) as file:
            content = _parsed(file.read(), self.name)
        if not isinstance(content, list):
            raise DataError(
                f"{self.name} contains a {type(content).__name__}; expected a list of objects, or one object per line."
            )
        for number, row in enumerate(content[cursor.position or 0 :], (cursor.position or 0) + 1):
            cursor.position = number
            yield PlacedRow(self, number, _checked(row, self.where(number)))


@dataclass(frozen=True)
class Delimited(LocalFile):
    """A CSV or TSV file with a header. All values are text. A position is [offset in bytes, line]."""

    delimiter: str

    unit: ClassVar[str] = "line"

    def rows(self, cursor: Cursor) -> Iterator[PlacedRow]:
        """See `RowFile`."""
        csv.field_size_limit(LARGEST_ROW)  # the default would reject long texts
        with opened(self.path) as file:
            lines = _Lines(file, self.name)
            records = csv.reader(lines, delimiter=self.delimiter, strict=True)
            header = self._next(records, lines)
            if header is None:
                return
            if len(set(header)) < len(header) or not all(header):
                raise DataError(f"{self.name}: the header {header} has a duplicate or empty column name.")
            if cursor.position is not None:
                lines.seek(*cursor.position)
            number = lines.number + 1
            while (record := self._next(records, lines)) is not None:
                cursor.position = [lines.offset, lines.number]
                if len(record) == len(header):
                    yield PlacedRow(self, number, dict(zip(header, record, strict=True)))
                elif record:  # else the line is blank
                    where = self.where(number)
                    raise DataError(f"{where} has {len(record)} fields, but the header has {len(header)}.")
                number = lines.number + 1

    def _next(self, records: Iterator[list[str]], lines: _Lines) -> list[str] | None:
        number = lines.number + 1
        try:
            return next(records, None)
        except csv.Error as error:
            raise DataError(f"{self.where(number)} is not valid {DELIMITERS[self.delimiter]}: {error}.") from error


class _Lines:
    """Lines of a text file, with the position behind the last one that was read."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file, self._name = file, name
        self.offset = self.number = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._file.readline(LARGEST_ROW + 1)
        if not line:
            raise StopIteration
        self.offset, self.number = self.offset + len(line), self.number + 1
        _check_size(line, f"{self._name}, line {self.number}")
        try:
            return line.decode("utf-8-sig" if self.number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{self._name}, line {self.number} is not UTF-8 text: {error}.") from error

    def seek(self, offset: int, number: int) -> None:
        """Continue at another position."""
        self._file.seek(offset)
        self.offset, self.number = offset, number


class _Unzipped(gzip.GzipFile):
    """A gzip file that raises an error after more bytes than text can have in a file of its size."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(fileobj=file)
        self._path, self._most = path, largest_content(path.stat().st_size)

    def read(self, size: int | None = -1) -> bytes:
        rest = self._most + 1 - self.tell()
        return self._checked(super().read(rest if size is None or size < 0 else min(size, rest)))

    def readline(self, size: int | None = -1) -> bytes:
        return self._checked(super().readline(size))

    def _checked(self, data: bytes) -> bytes:
        if self.tell() > self._most:
            raise too_large(str(self._path), self._most)
        return data


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, decompressed if it is a gzip file.

    Raises:
        DataError: the compressed data is damaged.
    """
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        try:
            yield _Unzipped(file, path) if zipped else file  # type: ignore[misc]
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{path} is not a readable gzip file: {error}") from error


def _check_size(line: bytes, where: str) -> None:
    if len(line) > LARGEST_ROW:
        raise row_too_large(where)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, whose keys must differ.

    Raises:
        ValueError: a key occurs twice.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise ValueError(f"the key {twice!r} occurs twice in an object")
    return found


def _parsed(data: bytes, where: str) -> Any:
    """Parse JSON, and reject text that UTF-8 cannot encode, such as an unpaired surrogate escape.

    Args:
        data: Content of the file, or of one line.
        where: File and line, for messages.

    Raises:
        DataError: the data is not valid JSON.
    """
    try:
        found = json.loads(data, object_pairs_hook=_object)
        if b"\\u" in data:
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # invalid syntax, encoding or nesting depth
        raise DataError(f"{where} is not valid JSON: {error}") from error
    return found


def _checked(row: Any, where: str) -> Row:
    """Return a row.

    Raises:
        DataError: it is not an object.
    """
    if not isinstance(row, dict):
        raise DataError(f"{where} contains a {type(row).__name__}; expected an object with columns.")
    return row

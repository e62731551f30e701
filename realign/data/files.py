"""Files of rows that can be read from any position: JSON, CSV and TSV (also gzipped), parquet, Arrow, saved folders.

A position is a small JSON value, so a checkpoint of streamed data can store it. Every format limits how much memory a
row or a compressed file can take, since data files come from strangers.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, TypeAlias

from typing_extensions import override

from realign.cells import read_column
from realign.data.columns import Row
from realign.errors import DataError
from realign.text import first_line

Position: TypeAlias = Any
"""Position between two rows of a file, as a JSON value; None is the start."""

_EDGE = 65536
LARGEST_ROW = 2**28
"""Bytes that a row may have."""
_LARGEST_RATIO = 200
"""Bytes of rows per byte of a compressed file, in addition to `LARGEST_ROW`. Text has a ratio of 3 to 30."""


def _largest_content(size: int) -> int:
    """Return how many bytes the rows of a compressed file of this size may have. More are an attack on the memory."""
    return LARGEST_ROW + _LARGEST_RATIO * size


def _too_large(name: str, most: int) -> DataError:
    """Return the error of a compressed file with more than `most` bytes."""
    return DataError(
        f"{name} is a compressed file with more than {most // 2**20:,} MiB of rows, far more than text has. "
        "If this is right, store the rows as JSONL without compression."
    )


def _row_too_large(where: str) -> DataError:
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
    """A file or folder of this machine."""

    path: Path

    @property
    @override
    def name(self) -> str:
        return str(self.path)

    @override
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
    @override
    def name(self) -> str:
        return self.title

    @override
    def rows(self, cursor: Cursor) -> Iterator[PlacedRow]:
        start, position, count = cursor.position or (0, None, 0)
        for index in range(start, len(self.files)):
            inner = Cursor(position)
            position = None
            for placed in self.files[index].rows(inner) if count < self.limit else ():
                count += 1
                # Before the yield: the caller may stop after any row, and resumes behind it. All readers here do so.
                cursor.position = [index, inner.here(), count]
                yield placed
                if count == self.limit:
                    return

    @override
    def identity(self) -> str:
        return f"{self.limit} of {[file.identity() for file in self.files]}"

    @override
    def leaves(self) -> list[RowFile]:
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
    @override
    def name(self) -> str:
        return self.file.name

    @override
    def rows(self, cursor: Cursor) -> Iterator[PlacedRow]:
        renamed = set(self.columns.values())
        for placed in self.file.rows(cursor):
            try:
                new_columns = {new: read_column(placed.row, old) for new, old in self.columns.items()}
            except DataError as error:
                raise DataError(f"{placed.where}: columns: {error}") from error
            other_columns = {name: value for name, value in placed.row.items() if name not in renamed}
            yield placed._replace(row=other_columns | new_columns)

    @override
    def identity(self) -> str:
        return f"{json.dumps(self.columns, sort_keys=True)} of {self.file.identity()}"

    @override
    def leaves(self) -> list[RowFile]:
        return self.file.leaves()


_DELIMITERS = {",": "CSV", ";": "CSV with semicolons", "\t": "TSV"}
"""Delimiters of a file, and names of the formats."""


@dataclass(frozen=True)
class JsonLinesFile(LocalFile):
    """A file with one JSON object per line. Blank lines are skipped. A position is [offset in bytes, line]."""

    unit: ClassVar[str] = "line"

    @override
    def rows(self, cursor: Cursor) -> Iterator[PlacedRow]:
        offset, number = cursor.position or (0, 0)
        with _open_unzipped(self.path) as lines:
            lines.seek(offset)
            while line := lines.readline(LARGEST_ROW + 1):  # one byte more tells a row of that size from a longer one
                offset, number = offset + len(line), number + 1
                _check_size(line, self.where(number))
                if line.strip():
                    where = self.where(number)
                    row = _check_row(_parse(line, where), where)
                    cursor.position = [offset, number]
                    yield PlacedRow(self, number, row)


@dataclass(frozen=True)
class JsonListFile(LocalFile):
    """A file with one JSON list of objects. It is read as a whole. A position is the number of rows before it."""

    @override
    def rows(self, cursor: Cursor) -> Iterator[PlacedRow]:
        with _open_unzipped(self.path) as file:
            content = _parse(file.read(), self.name)
        if not isinstance(content, list):
            raise DataError(
                f"{self.name} contains a {type(content).__name__}; expected a list of objects, or one object per line."
            )
        for number, row in enumerate(content[cursor.position or 0 :], (cursor.position or 0) + 1):
            cursor.position = number
            yield PlacedRow(self, number, _check_row(row, self.where(number)))


@dataclass(frozen=True)
class DelimitedFile(LocalFile):
    """A CSV or TSV file with a header. All values are text. A position is [offset in bytes, line]."""

    delimiter: str

    unit: ClassVar[str] = "line"

    @override
    def rows(self, cursor: Cursor) -> Iterator[PlacedRow]:
        # This is a setting of the process; csv has none for one reader.
        csv.field_size_limit(LARGEST_ROW)  # the default would reject long texts
        with _open_unzipped(self.path) as file:
            lines = _Lines(file, self.name)
            records = csv.reader(lines, delimiter=self.delimiter, strict=True)
            header = self._next(records, lines)
            if header is None:
                return
            if not header[0] and all(header[1:]) and header[1:]:
                raise DataError(
                    f"{self.name}: the first column has no name, as the index of pandas. Save the file with "
                    "index=False, or name the column."
                )
            if len(set(header)) < len(header) or not all(header):
                raise DataError(f"{self.name}: the header {header} has a duplicate or empty column name.")
            if cursor.position is not None:
                # csv.reader keeps no line between two records, so its lines may continue elsewhere.
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
            raise DataError(f"{self.where(number)} is not valid {_DELIMITERS[self.delimiter]}: {error}.") from error


# A text file of Python has no position while it is iterated, so lines are read as bytes and decoded one by one.
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
        encoding = "utf-8-sig" if self.number == 1 else "utf-8"
        return _decode(line, f"{self._name}, line {self.number}", encoding)

    def seek(self, offset: int, number: int) -> None:
        """Continue at another position."""
        self._file.seek(offset)
        self.offset, self.number = offset, number


class _Unzipped(gzip.GzipFile):
    """A gzip file that raises an error after more bytes than text can have in a file of its size."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(fileobj=file)
        self._path, self._most = path, _largest_content(path.stat().st_size)

    def read(self, size: int | None = -1) -> bytes:
        # One byte beyond the limit is enough to notice it, so that no more is decompressed into memory.
        rest = self._most + 1 - self.tell()
        return self._check_unzipped(super().read(rest if size is None or size < 0 else min(size, rest)))

    def readline(self, size: int | None = -1) -> bytes:
        return self._check_unzipped(super().readline(size))

    def _check_unzipped(self, data: bytes) -> bytes:
        if self.tell() > self._most:
            raise _too_large(str(self._path), self._most)
        return data


@contextmanager
def _open_unzipped(path: Path) -> Iterator[IO[bytes]]:
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
        raise _row_too_large(where)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, whose keys must differ.

    Raises:
        ValueError: a key occurs twice.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise ValueError(f"the key {twice!r} occurs twice in an object")
    return values


def _parse(data: bytes, where: str) -> Any:
    """Parse JSON, and reject text that UTF-8 cannot encode, such as an unpaired surrogate escape.

    Args:
        data: Content of the file, or of one line.
        where: File and line, for messages.

    Raises:
        DataError: the data is not valid JSON.
    """
    text = _decode(data, where)
    try:
        content = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:  # invalid syntax or nesting depth
        raise DataError(f"{where} is not valid JSON: {error}") from error
    # Only an escape can make an unpaired surrogate, so most rows skip the second pass.
    if "\\u" in text:
        try:
            json.dumps(content, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise DataError(f"{where} has {half} alone, half of a character. Remove it.") from error
    return content


def _decode(data: bytes, where: str, encoding: str = "utf-8-sig") -> str:
    """Return UTF-8 text, by default without the byte order mark that Excel and editors of Windows write.

    Raises:
        DataError: it has another encoding.
    """
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8 text: byte {data[error.start]:#04x} at position {error.start}. Save the file as "
            "UTF-8. If it is Latin-1 or of Windows: iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW."
        ) from error


def _check_row(row: Any, where: str) -> Row:
    """Return a row.

    Raises:
        DataError: it is not an object.
    """
    if not isinstance(row, dict):
        raise DataError(f"{where} contains a {type(row).__name__}; expected an object with columns.")
    return row


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
        self._name, self._most, self._total = name, _largest_content(size), 0

    def number_rows(self, batches: Iterable[Any], cursor: Cursor, skip: int) -> Iterator[tuple[int, Row]]:
        """Yield number and row of the rows behind the position of the cursor, and move the cursor.

        Args:
            batches: Record batches or tables.
            cursor: Its position is the number of rows before it.
            skip: Number of rows at the start of `batches` that are before the position.
        """
        number = cursor.position or 0
        for batch in batches:
            for row in self.rows(batch, skip):
                number += 1
                cursor.position = number
                yield number, row
            skip -= min(skip, len(batch))

    def rows(self, batch: Any, start: int) -> Iterator[Row]:
        """Yield the rows of a record batch or table from a position.

        Raises:
            DataError: columns have the same name, or the rows are too large.
            ArrowInvalid: the batch is damaged. Reading it could end the process, or read other memory.
        """
        if twice := sorted({name for name in batch.schema.names if batch.schema.names.count(name) > 1}):
            raise DataError(f"{self._name} has several columns with the name {twice[0]!r}. Rename them.")
        # pyarrow trusts the offsets in a file. Those of a damaged one may point outside of it, which ends in SIGSEGV.
        batch.validate(full=True)
        for first in range(min(start, len(batch)), len(batch), _BATCH):
            for row in batch.slice(first, _BATCH).to_pylist():
                self._total += (size := _size(row))
                if size > LARGEST_ROW:
                    raise _row_too_large(f"a row of {self._name}")
                if self._total > self._most:
                    raise _too_large(self._name, self._most)
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
class ParquetFile(LocalFile):
    """A parquet file. A position is the number of rows before it."""

    @override
    def rows(self, cursor: Cursor) -> Iterator[PlacedRow]:
        import pyarrow
        import pyarrow.parquet

        start = cursor.position or 0
        try:
            with pyarrow.parquet.ParquetFile(self.path) as file:
                sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
                first = 0
                # Row groups before the position are skipped without reading them.
                while first < len(sizes) and start >= sizes[first]:
                    start -= sizes[first]
                    first += 1
                converter = _Converter(self.name, self.path.stat().st_size)
                batches = file.iter_batches(_BATCH, row_groups=range(first, len(sizes)))
                for number, row in converter.number_rows(batches, cursor, start):
                    yield PlacedRow(self, number, row)
        except (pyarrow.ArrowException, *_DAMAGED) as error:
            raise DataError(f"{self.name} is not a readable parquet file: {first_line(error)}") from error


@dataclass(frozen=True)
class ArrowFile(LocalFile):
    """A file in the Arrow IPC file format or streaming format. A position is the number of rows before it."""

    @override
    def rows(self, cursor: Cursor) -> Iterator[PlacedRow]:
        import pyarrow

        try:
            with pyarrow.memory_map(str(self.path)) as file:
                converter = _Converter(self.name, self.path.stat().st_size)
                for number, row in converter.number_rows(self._batches(file), cursor, cursor.position or 0):
                    yield PlacedRow(self, number, row)
        except (pyarrow.ArrowException, *_DAMAGED) as error:
            raise DataError(f"{self.name} is not a readable arrow file: {first_line(error)}") from error

    def _batches(self, file: Any) -> Iterator[Any]:
        import pyarrow

        if file.read(6) == b"ARROW1":
            reader = pyarrow.ipc.open_file(file)
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            file.seek(0)
            yield from pyarrow.ipc.open_stream(file)


@dataclass(frozen=True)
class SavedFolder(LocalFile):
    """A folder written by `datasets`' `save_to_disk`. A position is the number of rows before it."""

    @override
    def rows(self, cursor: Cursor) -> Iterator[PlacedRow]:
        import datasets

        try:
            for number, row in rows_of(datasets.load_from_disk(str(self.path)), cursor, self.name):
                yield PlacedRow(self, number, row)
        except DataError:
            raise
        except Exception as error:  # `datasets` raises various exceptions for missing or corrupt files
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise DataError(f"{self.name} cannot be read as a dataset: {reason}") from error

    @override
    def identity(self) -> str:
        """Return a hash of the state of the dataset and the sizes of its files."""
        digest = hashlib.sha256((self.path / "state.json").read_bytes())
        for file in sorted(self.path.glob("*.arrow")):
            digest.update(f"{file.name}:{file.stat().st_size}".encode())
        return digest.hexdigest()


def rows_of(dataset: Any, cursor: Cursor, name: str) -> Iterator[tuple[int, Row]]:
    """Yield number and row of the rows of a `datasets.Dataset` after a position, the number of rows before it."""
    # A dataset made in memory has no cache files.
    size = sum(Path(file["filename"]).stat().st_size for file in dataset.cache_files) or dataset.data.nbytes
    tables = dataset.with_format("arrow")
    batches = (tables[start : start + _BATCH] for start in range(cursor.position or 0, len(dataset), _BATCH))
    yield from _Converter(name, size).number_rows(batches, cursor, 0)


SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
"""Suffixes of data files. `.gz` may follow those of text formats."""
FORMATS = "JSONL, JSON, CSV, TSV, parquet and arrow files"
_HEAD = 65536

_UTF_16 = "UTF-16 text: save it as UTF-8, such as with iconv -f UTF-16 -t UTF-8 OLD > NEW"
_PAGE = "a web page or XML, perhaps an error of the download: download it again"
_FOREIGN = {
    b"version https://git-lfs.github.com/": "a Git LFS pointer, not the file itself: run git lfs pull in its folder",
    b"\xff\xfe": _UTF_16,
    b"\xfe\xff": _UTF_16,
    b"PK\x03\x04": "a zip archive or an Excel workbook: unpack it, or save it as CSV",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: decompress it, or use gzip",
    b"\xfd7zXZ": "compressed with xz: decompress it, or use gzip",
    b"BZh91AY&SY": "compressed with bzip2: decompress it, or use gzip",
    **dict.fromkeys((b"<!", b"<?", b"<html", b"<HTML"), _PAGE),
}
"""First bytes of files that are not read, and what they are."""


def is_hidden(path: Path) -> bool:
    """Return whether a file in a folder belongs to another program, such as `._x` of macOS or .ipynb_checkpoints."""
    return any(part.startswith(".") for part in path.parts)


def recognize(path: Path) -> RowFile:
    """Return a file of rows in the format that its content has, or else the format of its suffix.

    Raises:
        DataError: the format is unknown.
    """
    try:
        with _open_unzipped(path) as file:
            head = file.read(_HEAD)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    foreign = next((what for start, what in _FOREIGN.items() if head.startswith(start)), None)
    if b"\0\0" in (head[:3:2], head[1:4:2]) and head[:4].count(0) == 2:  # UTF-16 without a byte order mark
        foreign = _UTF_16
    if foreign is not None:
        raise DataError(f"{path} is {foreign}. Supported: {FORMATS}.")
    suffixes = [suffix.lower() for suffix in path.suffixes]
    suffix = suffixes[-2] if suffixes[-1:] == [".gz"] and len(suffixes) > 1 else (suffixes or [""])[-1]
    if not head and suffix in (".parquet", ".arrow"):
        raise DataError(f"{path} is empty.")
    # The content decides first, since suffixes are often wrong. JSON under a binary suffix is read as JSON.
    if head.startswith(b"PAR1") or (suffix == ".parquet" and head[:1] not in b"{["):
        return ParquetFile(path)
    # ARROW1 begins the file format, and ff ff ff ff each message of the streaming format.
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")) or (suffix == ".arrow" and head[:1] not in b"{["):
        return ArrowFile(path)
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if suffix in (".csv", ".tsv") and not _is_json_line(text):
        return DelimitedFile(path, _delimiter(text, suffix))
    if suffix == ".json" and not _is_json_line(text):
        return JsonListFile(path)
    if text.startswith(b"["):
        return JsonListFile(path)
    if suffix in (".jsonl", ".ndjson", ".json") or _is_json_line(text):
        return JsonLinesFile(path)
    reason = f"unknown file type {suffix!r}" if suffix else "the file has no suffix"
    raise DataError(
        f"{path}: {reason}, and its content is none of the supported formats. Supported: {FORMATS}, and "
        "folders of them."
    )


def _is_json_line(text: bytes) -> bool:
    """Return whether the first line is a JSON object, and another line follows it."""
    line, _, rest = text.partition(b"\n")
    if not line.startswith(b"{"):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return len(text) >= _HEAD and not rest  # the first line is longer than the part that was read
    return bool(rest.strip())


def _delimiter(text: bytes, suffix: str) -> str:
    """Return the delimiter of a header: that of the suffix if the header has it, or else one that it has."""
    header = text.partition(b"\n")[0].decode(errors="replace")
    usual = "," if suffix == ".csv" else "\t"
    return next((sign for sign in (usual, *_DELIMITERS) if sign in header), usual)

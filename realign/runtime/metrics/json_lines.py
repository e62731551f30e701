"""Files with one JSON object per line, which lose no line if a run is killed or the disk is full for a while."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from realign.engines.files.folders import open_regular
from realign.errors import ConfigError

_MOST_WAITING = 10_000
_CHUNK = 1 << 20


class JsonLines:
    """A file with one JSON object per line. Each line is written immediately, so a killed run loses no lines.

    If a line cannot be written (a full disk), the class warns and keeps the line. It retries with the next line, so
    no line is missing once there is space. The file never contains a partial line. If the file is removed or moved
    during the run, it is created again at its path.

    Args:
        path: Path of the file.
        keep_bytes: Bytes of an earlier run to keep at the start of the file. The rest is truncated.
        seconds: Elapsed seconds at which the clock starts.
    """

    def __init__(self, path: Path, keep_bytes: int = 0, *, seconds: float = 0.0) -> None:
        self.path = path
        self._waiting: deque[bytes] = deque()
        self._lost = 0
        self._problem = ""
        self._start = time.perf_counter() - seconds
        self._file = _opened(path)
        self._torn_at: int | None = None
        self._file.truncate(min(keep_bytes, self.size))
        self._hash = prefix_hash(path, self.size)

    @property
    def size(self) -> int:
        """Size of the complete lines in the file, in bytes."""
        return os.fstat(self._file.fileno()).st_size if self._torn_at is None else self._torn_at

    @property
    def seconds(self) -> float:
        """Seconds since the run started, without the time between a stop and a resume."""
        return time.perf_counter() - self._start

    def sync(self) -> int:
        """Retry pending lines, sync the file to disk, and return its size in bytes."""
        self._write_waiting()
        os.fsync(self._file.fileno())
        return self.size

    @property
    def sha256(self) -> str:
        """Sha256 of the complete lines, as they were written."""
        return self._hash.hexdigest()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append `{"step", "seconds", metric: value, ...}`. Non-finite values become null."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self.write({"step": step, "seconds": round(self.seconds, 3), **finite})

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a JSON object."""
        line = json.dumps(record, ensure_ascii=False, default=str) + "\n"
        self._waiting.append(line.encode(errors="backslashreplace"))  # escape lone surrogates as JSON does
        if len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft()
            self._lost += 1
        self._write_waiting()

    def close(self) -> None:
        """Close the file, and warn about lines that could not be written."""
        self._write_waiting()
        if lines := self._lost + len(self._waiting):
            warnings.warn(f"{self.path}: {lines} lines could not be written. They are lost.", stacklevel=2)
        self._file.close()

    def _write_waiting(self) -> None:
        try:
            self._find()
            while self._waiting:
                self._append(self._waiting[0])
                self._waiting.popleft()
        except (OSError, ConfigError) as error:  # ConfigError: the path became a pipe or a link
            if not self._problem:
                self._problem = (error.strerror if isinstance(error, OSError) else None) or str(error)
                warnings.warn(
                    f"{self.path} cannot be written after byte {self.size} ({self._problem}). Training continues and "
                    "writes the pending lines later.",
                    stacklevel=3,
                )
            return
        if self._problem:
            self._problem = ""
            lost = f"{self._lost} lines are lost." if self._lost else "No line is missing."
            warnings.warn(f"{self.path} can be written again. {lost}", stacklevel=3)

    def _find(self) -> None:
        """Reopen the file at its path if it was removed or moved."""
        try:
            if os.path.samestat(os.fstat(self._file.fileno()), self.path.stat()):
                return
        except FileNotFoundError:
            pass
        self.path.parent.mkdir(parents=True, exist_ok=True)
        found = _opened(self.path)
        self._file.close()
        self._file, self._torn_at = found, None
        self._hash = prefix_hash(self.path, self.size)
        warnings.warn(
            f"{self.path} was removed or moved during the run. A new file starts with the next line.", stacklevel=4
        )

    def _append(self, line: bytes) -> None:
        if self._torn_at is not None:
            self._file.truncate(self._torn_at)
            self._torn_at = None
        end, rest = self.size, memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._torn_at = end
            with suppress(OSError):
                self._file.truncate(end)
            raise
        self._hash.update(line)


def _opened(path: Path) -> BinaryIO:
    return open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, "ab")


def prefix_hash(path: Path, size: int) -> hashlib._Hash:
    """Return the sha256 of the first `size` bytes of a file, which may be continued."""
    digest = hashlib.sha256()
    for chunk in prefix(path, size):
        digest.update(chunk)
    return digest


def prefix(path: Path, size: int) -> Iterator[bytes]:
    """Yield the first `size` bytes of a regular file in chunks."""
    with open_regular(path, os.O_RDONLY, "rb") as file:
        while size > 0 and (chunk := file.read(min(size, _CHUNK))):
            yield chunk
            size -= len(chunk)


class Nowhere(JsonLines):
    """No-op JSONL writer for ranks other than 0."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def sync(self) -> int:
        """Return 0, since there is no file."""
        return 0

    @property
    def sha256(self) -> str:
        """Empty, since there is no file."""
        return ""

    def write(self, record: Mapping[str, Any]) -> None:
        """Discard the record."""

    def close(self) -> None:
        """Do nothing."""

"""Record files of a run with one line per step or response, and how a resumed run continues them."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self

from realign.errors import ConfigError
from realign.own_files import make_folder, open_regular
from realign.records.checkpoint.folder import Start
from realign.records.checkpoint.schema import RECORDS
from realign.records.recorded_calls import remove_later_calls

_MOST_WAITING = 10_000
_CHUNK = 1 << 20
_TAIL = 1 << 20
"""Bytes at the end of metrics.jsonl that contain its last line."""


class JsonLinesWriter:
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
        self.added: Mapping[str, str] = {}
        """Further entries of each line of metrics."""
        self._waiting: deque[bytes] = deque()
        self._lost = 0
        self._problem = ""
        self._start = time.perf_counter() - seconds
        self._file = _open(path)
        self._torn_at: int | None = None
        self._file.truncate(min(keep_bytes, self.size))
        self._hash = _prefix_hash(path, self.size)

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
        """Append `{"step", "seconds", ...added, metric: value, ...}`. Non-finite values become null."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self.write({"step": step, "seconds": round(self.seconds, 3), **self.added, **finite})

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
                # removed only after it is written, so that an error keeps the line for the next attempt
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
        make_folder(self.path.parent)
        reopened = _open(self.path)
        self._file.close()
        self._file, self._torn_at = reopened, None
        self._hash = _prefix_hash(self.path, self.size)
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
                # the file is unbuffered, so a write may accept only a part of the line
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._torn_at = end
            # if this fails too, the next write takes the torn line back
            with suppress(OSError):
                self._file.truncate(end)
            raise
        self._hash.update(line)


def _open(path: Path) -> BinaryIO:
    # append mode: after a truncation the next write goes to the new end by itself
    return open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, "ab")


class Digest(Protocol):
    """A hash of `hashlib`."""

    def update(self, data: bytes, /) -> None:
        """Continue the hash."""

    def hexdigest(self) -> str:
        """Return the hash of everything so far."""


def _prefix_hash(path: Path, size: int) -> Digest:
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


class Records:
    """The record files of a run, such as metrics.jsonl and samples.jsonl."""

    def __init__(self, folder: Path, start: Start | None, settings: str) -> None:
        """Open the files in `folder`. When resuming from `start`, truncate them to their size at its checkpoint,
        and remove the recorded calls of later steps.

        `settings` is the hash of the settings of the steps to come, which each line of metrics.jsonl has.
        """
        state: Mapping[str, Any] = {"seconds": 0.0, "sizes": {}}
        self.recorded = -1
        """Last step in metrics.jsonl before it was truncated; -1 if there is none."""
        if start is not None and start.own:
            self.recorded = _last_step(folder / "metrics.jsonl")
        if start is not None and not start.new_run:
            state = start.state["records"]
            self._take_over(folder, start, state)
        remove_later_calls(folder, 0 if start is None else start.step)
        opened = [
            JsonLinesWriter(folder / f"{name}.jsonl", state["sizes"].get(name, 0), seconds=state["seconds"])
            for name in RECORDS
        ]
        # in the order of `RECORDS`
        self.metrics, self.samples, self.eval_samples, self.tokens, self.spans, self.warnings, self.system = opened
        self.metrics.added = {"settings": settings}
        self.files = dict(zip(RECORDS, opened, strict=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        with ExitStack() as stack:  # close all files, even if one fails to close
            for file in self.files.values():
                stack.callback(file.close)

    def state_dict(self) -> dict[str, Any]:
        """Sync the files to disk, and return the elapsed seconds and the size (bytes) and sha256 of each file."""
        sizes = {name: file.sync() for name, file in self.files.items()}
        hashes = {name: file.sha256 for name, file in self.files.items()}
        return {"seconds": self.metrics.seconds, "sizes": sizes, "sha256": hashes}

    def history(self) -> list[dict[str, float]]:
        """Return the metrics of all steps so far. Unreadable lines are skipped with a warning."""
        records = []
        for number, line in enumerate(self.metrics.path.read_bytes().splitlines(), 1):
            try:
                record = json.loads(line)
                for name in ("seconds", "settings"):
                    record.pop(name, None)
                records.append({name: math.nan if value is None else value for name, value in record.items()})
            except (ValueError, AttributeError) as error:
                warnings.warn(f"{self.metrics.path}, line {number}: {error}. The line is skipped.", stacklevel=2)
        return records

    def _take_over(self, folder: Path, start: Start, state: Mapping[str, Any]) -> None:
        """Warn about files that differ from those at the checkpoint, and copy the files of another run."""
        for name, size in state["sizes"].items():
            source = start.run / f"{name}.jsonl"
            if size or os.path.lexists(source):
                # before the copy, since the copy is what the run continues
                _compare(source, size, state["sha256"][name], start.step)
            if not start.own and os.path.lexists(source):
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                with io.BufferedWriter(open_regular(folder / source.name, flags, "wb")) as copy:
                    copy.writelines(prefix(source, size))


def _last_step(path: Path) -> int:
    """Return the step of the last whole line of metrics.jsonl; -1 if it has none."""
    with suppress(OSError, ConfigError), open_regular(path, os.O_RDONLY, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        for line in reversed(file.read().splitlines()):
            with suppress(ValueError, LookupError, TypeError):
                return int(json.loads(line)["step"])
    return -1


def _compare(path: Path, size: int, sha256: str, step: int) -> None:
    """Warn if the first `size` bytes of a record file are not those that the checkpoint counts."""
    if not os.path.lexists(path):
        actual_size = 0
    else:
        with open_regular(path, os.O_RDONLY, "rb") as file:
            actual_size = os.fstat(file.fileno()).st_size
    if actual_size < size:
        warnings.warn(
            f"{path} has {actual_size} bytes, but had {size} at the checkpoint of step {step}. The run continues; "
            "some of the earlier lines are missing.",
            stacklevel=2,
        )
    elif _prefix_hash(path, size).hexdigest() != sha256:
        warnings.warn(
            f"{path} was changed after the checkpoint of step {step} (sha256 mismatch in its first {size} bytes). The "
            "run continues and keeps the changed lines; its weights are not affected.",
            stacklevel=2,
        )

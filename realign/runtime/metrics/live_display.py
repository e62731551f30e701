"""Metric sinks: one `log` call per step updates the JSONL file, the live display and other trackers."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from realign.engines.files.durable import open_regular
from realign.errors import ConfigError
from realign.runtime.display import EVALUATION, first_metrics

MOST = 6
"""Headline metrics in a line without a terminal."""
DETAILS = ("/missing_rewards", "/std")
"""Ends of the names of held-out metrics that only metrics.jsonl and the charts contain."""
_MOST_WAITING = 10_000
_CHUNK = 1 << 20


class Tracker(Protocol):
    """A sink for the metrics of each step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of `step` (0: before training)."""
        ...

    def close(self) -> None:
        """Flush the metrics and release resources."""
        ...


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


class Forgiving:
    """A tracker wrapper that turns failures into warnings, so that they never stop a run.

    Args:
        name: Name of the tracker, for messages.
        tracker: Wrapped tracker.
    """

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name = name
        self._tracker = tracker
        self._missed: list[int] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Forward the metrics to the tracker. Warn about the first failure and count later ones."""
        try:
            self._tracker.log(step, metrics)
        except Exception as error:
            self._missed.append(step)
            if len(self._missed) == 1:
                what = f"Tracker {self.name!r} failed at step {step} ({type(error).__name__}: {error})"
                warnings.warn(f"{what}. Training continues; metrics.jsonl contains this step.", stacklevel=2)

    def close(self) -> None:
        """Close the tracker, and warn about the number of steps that it missed."""
        try:
            self._tracker.close()
        except Exception as error:
            warnings.warn(f"Tracker {self.name!r} could not be closed ({type(error).__name__}: {error}).", stacklevel=2)
        if self._missed:
            first, last = self._missed[0], self._missed[-1]
            n = len(self._missed)
            warnings.warn(f"Tracker {self.name!r} missed {n} steps, from {first} to {last}.", stacklevel=2)


class LiveDisplay:
    """A progress bar above a table of the latest metrics. Without a terminal, it prints a line every few steps.

    Args:
        console: where to show it.
        title: name of the run.
        steps: number of steps of the run.
        shown: headline metrics, most important first.
        header: lines above the progress bar, such as the folder of the run.
        added: metrics of callbacks, which are shown after the headline metrics. It may grow during the run.
        activity: returns what the run is doing, such as the current call; empty for nothing.
    """

    def __init__(
        self,
        console: Console,
        title: str,
        steps: int,
        shown: Sequence[str] = (),
        *,
        header: Sequence[str] = (),
        added: Collection[str] = (),
        activity: Callable[[], str] | None = None,
    ) -> None:
        self._console, self._steps, self._shown, self._added = console, steps, tuple(shown), added
        self._header, self._activity = tuple(header), activity
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("elapsed"),
            TimeElapsedColumn(),
            TextColumn("remaining"),
            TimeRemainingColumn(),
            console=console,
        )
        self._title = title
        self._task = self._progress.add_task(escape(title), total=steps)
        self._latest: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4)
            self._live.start()
        else:
            with suppress(OSError):  # `log` meets the same error, and `Forgiving` warns about it
                for line in self._header:
                    self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a finished step."""
        for name, value in metrics.items():
            self._first.setdefault(name, value)
        self._latest |= metrics
        self._progress.update(self._task, completed=step)
        if self._live is not None:
            self._live.refresh()
        elif (
            step == self._steps or step % max(1, self._steps // 10) == 0 or any(n.startswith("eval/") for n in metrics)
        ):
            names = [name for name in self._names() if name in metrics]
            extra = {name for name in names if name.startswith(EVALUATION) or name in self._added}
            limited = [name for name in names if name not in extra][:MOST]
            shown = [f"{name} {_number(metrics[name])}" for name in names if name in extra or name in limited]
            line = f"{self._title} step {step}/{self._steps}  " + "  ".join(shown)
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Stop the live update; the last state stays on the screen."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()  # renders once more, without the activity

    def _names(self) -> list[str]:
        names = [name for name in self._shown if name in self._latest] or first_metrics(self._latest)
        more = held_out(self._latest)
        more += [name for name in tuple(self._added) if name in self._latest]
        return [*names, *(name for name in more if name not in names)]

    def _render(self) -> Table:
        outer = Table.grid()
        for line in self._header:
            outer.add_row(Text(line, style="dim"))
        outer.add_row(self._progress)
        doing = self._activity() if self._activity is not None and self._live is not None else ""
        if doing:
            outer.add_row(Text(doing, style="dim"))
        table = Table(box=None, padding=(0, 2))
        for column in ("metric", "first", "latest"):
            table.add_column(column, justify="left" if column == "metric" else "right")
        for name in self._names():
            table.add_row(escape(name), _number(self._first[name]), _number(self._latest[name]))
        if self._latest:
            outer.add_row(table)
        return outer


def held_out(reported: Iterable[str]) -> list[str]:
    """Return the metrics of evaluations without their `DETAILS`."""
    return [name for name in reported if name.startswith(EVALUATION) and not name.endswith(DETAILS)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"

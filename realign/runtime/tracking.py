"""Where metrics go: one `log` call per step feeds the JSONL file, the live display and whoever else listens."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table


class Tracker(Protocol):
    """Something that takes the metrics of a step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of `step` (0: before training)."""
        ...

    def close(self) -> None:
        """Flush and release."""
        ...


class JsonLines:
    """One JSON object per step in a file, written through at once so that a killed run keeps what it had."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._start = time.perf_counter()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append `{"step", "seconds", metric: value, ...}`; a non-finite value becomes null, as JSON has none."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self.write({"step": step, "seconds": round(time.perf_counter() - self._start, 3), **finite})

    def write(self, record: Mapping[str, Any]) -> None:
        """Append any JSON object."""
        self._file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class LiveDisplay:
    """A progress bar over a table of the latest metrics; plain lines now and then where there is no terminal."""

    def __init__(self, console: Console, title: str, steps: int, shown: Sequence[str] = ()) -> None:
        self._console, self._steps, self._shown = console, steps, tuple(shown)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._title = title
        self._task = self._progress.add_task(title, total=steps)
        self._latest: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(self._render(), console=self._console, refresh_per_second=4)
            self._live.start()
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
            self._live.update(self._render())
        elif (
            step == self._steps or step % max(1, self._steps // 10) == 0 or any(n.startswith("eval/") for n in metrics)
        ):
            shown = [f"{name} {_number(metrics[name])}" for name in self._names() if name in metrics][:6]
            line = f"{self._title} step {step}/{self._steps}  " + "  ".join(shown)
            self._console.print(line, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _names(self) -> list[str]:
        return [name for name in self._shown if name in self._latest] or sorted(self._latest)[:12]

    def _render(self) -> Table:
        outer = Table.grid()
        outer.add_row(self._progress)
        table = Table(box=None, padding=(0, 2))
        for column in ("metric", "first", "latest"):
            table.add_column(column, justify="left" if column == "metric" else "right")
        for name in self._names():
            table.add_row(name, _number(self._first[name]), _number(self._latest[name]))
        outer.add_row(table)
        return outer


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"

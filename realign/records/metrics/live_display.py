"""The live display of a run: progress, and the course of its metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from realign.records.metrics.shown_metrics import (
    EVALUATION,
    MetricSummary,
    first_metrics,
    held_out_metrics,
    larger_is_better,
    limit_metrics,
    metric_summary,
    number,
)

BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values over time as at most `width` characters, from the lowest block (minimum) to the highest (maximum).

    Neighboring values share a character if there are more values than characters; it shows their mean. Values that are
    not finite are ignored; a character without a finite value is a space. Equal values are drawn in the middle.
    """
    columns = min(width, len(values))
    parts = [values[i * len(values) // columns : (i + 1) * len(values) // columns] for i in range(columns)]
    means = [sum(finite) / len(finite) if (finite := [v for v in p if math.isfinite(v)]) else None for p in parts]
    known = [mean for mean in means if mean is not None]
    low, span = (min(known), max(known) - min(known)) if known else (0.0, 0.0)
    top = len(BLOCKS) - 1

    def block(mean: float) -> str:
        # the range of huge values can overflow to infinity
        return BLOCKS[round((mean - low) / span * top) if 0 < span < math.inf else top // 2]

    return "".join(" " if mean is None else block(mean) for mean in means)


MOST = 6
"""Headline metrics in a line without a terminal."""
NARROWEST, WIDEST = 8, 48
"""Width of the column of curves in characters."""
NUMBERS = 66
"""Characters that the other columns of the table need."""
_MOST_WARNINGS = 3
"""Latest warnings that are shown."""


class LiveDisplay:
    """Progress, the course of the metrics, and the latest warnings, in a terminal or below the cell of a notebook.

    Elsewhere, such as in a file: a line every few steps.

    Args:
        console: where to show it.
        title: name of the run.
        steps: number of steps of the run.
        shown: headline metrics, most important first.
        header: lines above the progress bar, such as the folder of the run.
        added: metrics of callbacks, which are shown after the headline metrics. It may grow during the run.
        targets: values that the settings ask for, by metric.
        activity: returns what the run is doing, such as the current call; empty for nothing.
        warned: returns the messages of all warnings so far, or of the latest ones, and their number.
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
        targets: Mapping[str, float] | None = None,
        activity: Callable[[], str] | None = None,
        warned: Callable[[], tuple[Sequence[str], int]] | None = None,
    ) -> None:
        self._console, self._steps, self._shown, self._added = console, steps, tuple(shown), added
        self._header, self._targets, self._activity, self._warned = tuple(header), dict(targets or {}), activity, warned
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("elapsed"),
            TimeElapsedColumn(),
            TextColumn("remaining"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self._title = title
        self._task = self._progress.add_task(escape(title), total=steps)
        self._points: dict[str, list[tuple[int, float]]] = {}
        self._live: Live | None = None
        self._cell: Any = None  # output of a notebook

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4)
            self._live.start()
        elif self._console.is_jupyter and not self._console.quiet:
            from IPython.display import display  # not rich's `Live`, which needs ipywidgets there

            self._cell = display(self._render(), display_id=True)
        else:
            for line in self._header:
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a finished step."""
        for name, value in metrics.items():
            self._points.setdefault(name, []).append((step, value))
        self._progress.update(self._task, completed=step)
        if self._live is not None:
            self._live.refresh()
        elif self._cell is not None:
            self._cell.update(self._render())
        elif (
            step == self._steps or step % max(1, self._steps // 10) == 0 or any(n.startswith("eval/") for n in metrics)
        ):
            names = [name for name in self._names() if name in metrics]
            extra = {name for name in names if name.startswith(EVALUATION) or name in self._added}
            first = limit_metrics([name for name in names if name not in extra], MOST)
            shown = [f"{name} {number(metrics[name])}" for name in names if name in extra or name in first]
            if shown:  # before the first step, there may be nothing
                line = f"{self._title} step {step}/{self._steps}  " + "  ".join(shown)
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Stop the live update; the last state stays on the screen."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()  # renders once more, without the activity

    def _names(self) -> list[str]:
        names = [name for name in self._shown if name in self._points] or first_metrics(self._points)
        more: Iterable[str] = [*self._targets, *held_out_metrics(self._points, self._shown), *tuple(self._added)]
        return list(dict.fromkeys([*names, *(name for name in more if name in self._points)]))

    def _render(self) -> Table:
        outer = Table.grid(expand=True)
        for line in self._header:
            outer.add_row(Text(line, style="dim"))
        outer.add_row(self._progress)
        doing = self._activity() if self._activity is not None and self._live is not None else ""
        if doing:
            outer.add_row(Text(doing, style="dim"))
        if self._points:
            outer.add_row(self._table())
        if self._warned is not None:
            latest, total = self._warned()
            for row in _warnings(latest, total):
                outer.add_row(row)
        return outer

    def _table(self) -> Table:
        width = min(WIDEST, self._console.width - NUMBERS)
        draws = width >= NARROWEST and not self._console.options.ascii_only
        rows = [self._course(name) for name in self._names()]
        columns: dict[str, Callable[[MetricSummary], RenderableType]] = {
            "metric": lambda summary: Text(summary.name),
            "first": lambda summary: number(summary.first),
            "best": lambda summary: (
                "" if summary.best is None else f"{number(summary.best)} (step {summary.best_step:,})"
            ),
            "latest": lambda summary: number(summary.last),
            "target": lambda summary: number(self._targets[summary.name]) if summary.name in self._targets else "",
            "curve": lambda summary: Text(
                sparkline([value for _, value in self._points[summary.name]], width), style="cyan"
            ),
        }
        empty = {"target": not self._targets, "best": all(summary.best is None for summary in rows), "curve": not draws}
        table = Table(box=None, padding=(0, 2, 0, 0))
        for column in columns:
            if not empty.get(column):
                table.add_column(column, justify="left" if column in ("metric", "curve") else "right", no_wrap=True)
        for summary in rows:
            table.add_row(*(cell(summary) for column, cell in columns.items() if not empty.get(column)))
        return table

    def _course(self, name: str) -> MetricSummary:
        return metric_summary(name, self._points[name], larger_is_better(name, {}))


def _warnings(latest: Sequence[str], total: int) -> list[Text]:
    """Return a headline and one line for each of the latest warnings."""
    if not total:
        return []
    lines = [Text(f"{total} warning{'' if total == 1 else 's'}", style="bold yellow")]
    for message in latest[-_MOST_WARNINGS:]:
        lines.append(Text(f"  {message}", style="yellow", no_wrap=True, overflow="ellipsis"))
    return lines

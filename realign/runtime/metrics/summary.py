"""`RunSummary`: what a run did, where its files are, and what to do next; shown at its end and kept in summary.json."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from realign.api.callback import EndStatus
from realign.engines.files.folders import open_regular
from realign.runtime.metrics.shown_metrics import MetricSummary, number

NAME = "summary.json"


@dataclass(frozen=True)
class RunSummary:
    """The end of a run."""

    name: str
    """Name of the run."""
    status: EndStatus
    """How the run ended."""
    reason: str
    """Why it ended before its last step; empty otherwise."""
    step: int
    """Last completed step."""
    steps: int
    """Steps that the config asks for."""
    seconds: float
    """Duration, including the time before the checkpoint of a resumed run."""
    metrics: tuple[MetricSummary, ...]
    """Headline metrics, the evaluations first."""
    warnings: int
    """Number of warnings in realign.log."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path of each result that exists, by its meaning."""
    next_commands: Mapping[str, str] = field(default_factory=dict)
    """Commands to continue with, by their meaning."""
    findings: tuple[str, ...] = ()
    """Signs that the run trained without learning, and what to do about them."""

    def write(self, folder: Path) -> None:
        """Write summary.json. Values that are not finite become null."""
        values = dataclasses.asdict(self)
        for metric in values["metrics"]:
            metric.update(
                {key: None for key, value in metric.items() if isinstance(value, float) and not math.isfinite(value)}
            )
        text = json.dumps(values, indent=2, ensure_ascii=False, default=str)
        with open_regular(folder / NAME, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "wb") as file:
            file.write(f"{text}\n".encode(errors="backslashreplace"))

    def headline(self) -> str:
        """Return the first line of the summary."""
        done = f"{self.step:,} of {self.steps:,} steps in {duration(self.seconds)}"
        if self.status is EndStatus.completed:
            return f"{self.name}: {done}"
        return f"{self.name}: {self.status} after {done}"

    def show(self, console: Console) -> None:
        """Print the summary. The commands are below its frame and on one line each, so that they can be copied."""
        console.print(self._panel())
        width = max(map(len, self.next_commands), default=0)
        for meaning, command in self.next_commands.items():
            console.print(Text.assemble((f"{meaning:<{width}}", "bold"), "  ", command), soft_wrap=True)

    def _panel(self) -> Panel:
        parts: list[Table | Text] = []
        if self.status is EndStatus.stopped:
            parts += [Text(self.reason), Text()]
        if self.metrics:
            parts += [_course_table(self.metrics), Text()]
        for sentence in self.findings:
            parts += [Text(sentence, style="yellow"), Text()]
        files = Table.grid(padding=(0, 2))
        for meaning, path in self.files.items():
            files.add_row(Text(meaning, style="bold"), Text(path, overflow="fold"))
        if self.warnings:
            files.add_row(
                Text("warnings", style="bold yellow"), Text(f"{self.warnings}, see {self.files.get('log', '')}")
            )
        parts.append(files)
        style = "green" if self.status is EndStatus.completed and not self.findings else "yellow"
        return Panel(Group(*parts), title=Text(self.headline()), title_align="left", border_style=style)

    def text(self) -> str:
        """Return the summary as plain text."""
        console = Console(width=110, record=True, file=io.StringIO(), color_system=None)
        self.show(console)
        return console.export_text().rstrip()


def duration(seconds: float) -> str:
    """Return a duration such as `3 min 12 s`."""
    total = round(seconds)
    hours, minutes, rest = total // 3600, total // 60 % 60, total % 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _course_table(metrics: Sequence[MetricSummary]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("metric", "first", "best", "last"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for metric in metrics:
        best = "" if metric.best is None else f"{number(metric.best)} (step {metric.best_step:,})"
        table.add_row(Text(metric.name), number(metric.first), best, number(metric.last))
    return table


__all__ = ["NAME", "RunSummary", "duration"]

"""Table of the runs of a sweep, by the keys that differ between them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from realign.runtime.metrics.shown_metrics import number
from realign.runtime.metrics.summary import NAME
from realign.safe_yaml import load_yaml

UNFINISHED = "not finished"


@dataclass(frozen=True)
class SweptRun:
    """A run of a sweep."""

    folder: Path
    """Folder of the run."""
    overrides: Mapping[str, str]
    """Value of each override."""
    summary: Mapping[str, Any] | None
    """Content of summary.json; None if the run did not end."""

    @classmethod
    def read(cls, folder: Path) -> SweptRun:
        """Read the overrides and the summary of a run from its folder."""
        record = folder / ".hydra" / "overrides.yaml"
        words = load_yaml(record.read_text(encoding="utf-8")) if record.is_file() else []
        path, summary = folder / NAME, None
        with suppress(ValueError):  # cut off by a full disk
            summary = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        return cls(folder, dict(word.lstrip("+").partition("=")[::2] for word in words or []), summary)


def sweep_table(folders: Sequence[Path]) -> Table | None:
    """Return the table of the runs in `folders`; None if there are none."""
    runs = [SweptRun.read(folder) for folder in folders if folder.is_dir()]
    if not runs:
        return None
    keys = list(dict.fromkeys(key for run in runs for key in run.overrides))
    varied = [key for key in keys if len({run.overrides.get(key) for run in runs}) > 1]
    metric = _metric(runs)
    parent, here = folders[0].absolute().parent, Path.cwd()
    shown = parent.relative_to(here) if parent.is_relative_to(here) else parent
    table = Table(title=f"{len(runs)} runs in {shown}", title_justify="left")
    for column in ("run", *varied, "status", "steps"):
        table.add_column(Text(column), justify="right" if column == "steps" else "left")
    for part in ("first", "best", "last") if metric is not None else ():
        table.add_column(Text(f"{metric}\n{part}"), justify="right")
    for run in runs:
        cells = [run.folder.name, *(run.overrides.get(key, "") for key in varied), *_end(run)]
        cells += _course(run, metric) if metric is not None else []
        table.add_row(*map(Text, cells))
    return table


def _metric(runs: Sequence[SweptRun]) -> str | None:
    """Return the most important metric that all finished runs have; None if there is none."""
    named = [[metric["name"] for metric in run.summary["metrics"]] for run in runs if run.summary is not None]
    return next((name for name in named[0] if all(name in names for names in named)), None) if named else None


def _end(run: SweptRun) -> list[str]:
    return [UNFINISHED, ""] if run.summary is None else [str(run.summary["status"]), str(run.summary["step"])]


def _course(run: SweptRun, name: str) -> list[str]:
    found: Mapping[str, Any] = next((one for one in (run.summary or {}).get("metrics", ()) if one["name"] == name), {})
    values = [found.get(part) for part in ("first", "best", "last")]
    return ["" if value is None else number(value) for value in values]

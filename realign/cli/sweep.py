"""Table of the runs of a sweep, by the keys that differ between them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from realign.report.compare import counted, mean, named, seed_groups
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


def sweep_table(folders: Sequence[Path]) -> RenderableType | None:
    """Return the table of the runs in `folders`; None if there are none.

    Runs that differ only in their seeds are one row, with the mean over the seeds and its standard error.
    """
    runs = [SweptRun.read(folder) for folder in folders if folder.is_dir()]
    if not runs:
        return None
    groups = [[runs[i] for i in group] for group in seed_groups([run.overrides for run in runs])]
    first = [group[0] for group in groups] if len(groups) > 1 else runs
    keys = list(dict.fromkeys(key for run in first for key in run.overrides))
    varied = [key for key in keys if len({run.overrides.get(key) for run in first}) > 1]
    settings = [named(run.overrides, varied) for run in first]
    if len(groups) < len(first):
        groups, settings = [*([run] for run in runs), runs], [*settings, f"{len(runs)} seeds"]
    metric = _metric(runs)
    parent, here = folders[0].absolute().parent, Path.cwd()
    shown = parent.relative_to(here) if parent.is_relative_to(here) else parent
    means = ", mean ± standard error over seeds" if any(len(group) > 1 for group in groups) else ""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("run", *(["settings"] if varied else [])):
        table.add_column(column, overflow="fold")
    table.add_column("status", min_width=len("completed"))
    for column in ("steps", *(("first", "best", "last") if metric is not None else ())):
        table.add_column(column, justify="right", no_wrap=True)
    for group, setting in zip(groups, settings, strict=True):
        cells = [", ".join(run.folder.name for run in group), *([setting] if varied else [])]
        cells += [
            *_end(group),
            *(_mean(group, metric, part) for part in ("first", "best", "last") if metric is not None),
        ]
        table.add_row(*map(Text, cells))
    title = Text(f"{len(runs)} runs in {shown}" + (f": {metric}{means}" if metric is not None else ""), overflow="fold")
    return Group(title, table, Text(f"Settings: {', '.join(varied)}" if varied else "", overflow="fold"))


def _metric(runs: Sequence[SweptRun]) -> str | None:
    """Return the most important metric that all finished runs have; None if there is none."""
    found = [[metric["name"] for metric in run.summary["metrics"]] for run in runs if run.summary is not None]
    return next((name for name in found[0] if all(name in names for names in found)), None) if found else None


def _end(group: Sequence[SweptRun]) -> list[str]:
    ends = [
        (UNFINISHED, "") if (end := run.summary) is None else (str(end["status"]), str(end["step"])) for run in group
    ]
    return [counted([status for status, _ in ends]), ", ".join(dict.fromkeys(step for _, step in ends if step))]


def _mean(group: Sequence[SweptRun], name: str, part: str) -> str:
    courses = [one for run in group for one in (run.summary or {}).get("metrics", ()) if one["name"] == name]
    values = [one[part] for one in courses if one.get(part) is not None]
    return mean(values) + (f" (n={len(values)})" if 0 < len(values) < len(group) else "")

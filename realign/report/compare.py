"""`comparison`: a table of several runs for the terminal, with their metrics and the settings that differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from realign.report.data import run_data
from realign.report.page import unique_keys
from realign.rewards.text import visible
from realign.runtime.metrics.shown_metrics import number
from realign.runtime.metrics.summary import duration

MOST = 16
"""Metrics in the table."""
MOST_KEYS = 40
"""Settings in the table."""
LONGEST = 60
"""Maximum length of a value, in characters."""


def comparison(folders: Sequence[Path]) -> list[Table]:
    """Return the table of metrics, and the table of settings that differ, if any do."""
    runs = [run_data(folder, key) for folder, key in zip(folders, unique_keys(folders), strict=True)]
    tables = [_metrics(runs)]
    if keys := differing(runs):
        table = _table(runs, f"Different settings: {min(len(keys), MOST_KEYS)} of {len(keys)}")
        for key in keys[:MOST_KEYS]:
            table.add_row(_cell(key), *(_cell(_shown(run["config"], key)) for run in runs))
        tables.append(table)
    return tables


def differing(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the config keys whose values differ between runs, those that all runs have first."""
    keys = dict.fromkeys(key for run in runs for key in run["config"])
    found = [key for key in keys if len({json.dumps(run["config"].get(key), default=str) for run in runs}) > 1]
    return sorted(found, key=lambda key: not all(key in run["config"] for run in runs))


def _metrics(runs: Sequence[Mapping[str, Any]]) -> Table:
    table = _table(runs, "Metrics: last (best, step)")
    for name, cells in (
        ("status", [run["status"]["state"] for run in runs]),
        ("steps", [str((run["metrics"]["step"] or [0])[-1]) for run in runs]),
        ("duration", [duration(max(0.0, (run["metrics"]["seconds"] or [0.0])[-1] or 0.0)) for run in runs]),
        ("warnings", [str(len(run["warnings"])) for run in runs]),
    ):
        table.add_row(name, *map(_cell, cells))
    for name in _names(runs)[:MOST]:
        table.add_row(_cell(name), *(_cell(_course(run, name)) for run in runs))
    return table


def _names(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the metrics to compare: evaluations, then the headline metrics that a run recorded."""
    recorded = dict.fromkeys(name for run in runs for name in run["metrics"]["values"])
    held_out = [name for name in recorded if name.startswith("eval/")]
    headline = [name for run in runs for name in run["info"]["headline"] if name in recorded]
    return list(dict.fromkeys([*held_out, *headline])) or list(recorded)


def _course(run: Mapping[str, Any], name: str) -> str:
    values = [x for x in run["metrics"]["values"].get(name, ()) if x is not None]
    if not values:
        return ""
    best = next((one for one in run["summary"]["metrics"] if one["name"] == name and one["best"] is not None), None)
    end = f" ({number(best['best'])}, {best['best_step']})" if best is not None else ""
    return f"{number(values[-1])}{end}"


def _table(runs: Sequence[Mapping[str, Any]], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for run in runs:
        table.add_column(_cell(run["key"]), overflow="fold")
    return table


def _cell(text: str) -> Text:
    """Return a text of a run as one line that reaches neither the terminal's control sequences nor rich's markup."""
    shown = visible(text).replace("\n", "\\n").replace("\t", "\\t")
    return Text(shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}...")


def _shown(config: Mapping[str, Any], key: str) -> str:
    return "" if key not in config else "null" if config[key] is None else str(config[key])


__all__ = ["comparison", "differing"]

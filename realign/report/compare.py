"""`comparison`: several runs for the terminal, by the settings that tell them apart, with means over seeds.

Everything fits the width of the terminal: texts wrap, tables continue below, and nothing is cut off.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from realign.records.metrics.shown_metrics import held_out_metrics, is_noise, number
from realign.records.record_files import METRICS, json_lines
from realign.report.data import run_data
from realign.report.page import unique_keys
from realign.runtime.run_report import duration, parent_of
from realign.text import visible

_MOST_KEYS = 40
"""Settings in the list."""
_MOST_IN_NAME = 3
"""Settings in the name of a run."""
_LONGEST = 200
"""Maximum length of a value, in characters."""
_HEAD = 30
"""Width at which the head of a column wraps, if its values are shorter."""
_GAP = 2
"""Blanks between columns."""
_NAMES = ("name", "output_dir", "resume", "resume_allow", "resume_skip")
"""Settings that only name a run, or say how it was continued."""
_SEED = re.compile(r"(^|\.)seed$")
_Config = Mapping[str, Any]


def comparison(folders: Sequence[Path], width: int = 80) -> list[RenderableType]:
    """Return the metrics of runs, and the settings that differ, if any do.

    Runs that differ only in their seeds are one column, with the mean of their last values and its standard error. If
    all do, each run also has its own column.

    Args:
        folders: folders of the runs.
        width: columns of the terminal.
    """
    runs = [run_data(folder, key) for folder, key in zip(folders, unique_keys(folders), strict=True)]
    groups = seed_groups([run["config"] for run in runs])
    members = [[runs[i] for i in group] for group in groups]
    first = [group[0] for group in members] if len(members) > 1 else runs
    configs = [run["config"] for run in first]
    heads = names(configs, [run["key"] for run in first])
    if len(members) < len(first):
        members, heads = [*([run] for run in runs), runs], [*heads, f"{len(runs)} seeds"]
    elif len(members) < len(runs):
        heads = [f"{head} (n={len(group)})" for head, group in zip(heads, members, strict=True)]
    own = names([run["config"] for run in runs], [run["key"] for run in runs])
    return [*_metrics(members, heads, width), *_branches(runs, own), *_settings(configs)]


def seed_groups(configs: Sequence[_Config]) -> list[list[int]]:
    """Return the positions of the runs that differ only in their seeds (and names), together.

    Runs with the same seed stay apart, since something else than a setting differs between them.
    """
    groups: dict[str, list[int]] = {}
    for i, config in enumerate(configs):
        rest = {key: value for key, value in config.items() if key not in _NAMES and not _SEED.search(key)}
        groups.setdefault(json.dumps(rest, sort_keys=True, default=str), []).append(i)
    columns: list[list[int]] = []
    for group in groups.values():
        seeds = {json.dumps({k: v for k, v in configs[i].items() if _SEED.search(k)}, default=str) for i in group}
        columns += [group] if len(seeds) == len(group) else [[i] for i in group]
    return sorted(columns)


def names(configs: Sequence[_Config], folders: Sequence[str]) -> list[str]:
    """Return a name for each run by the settings that differ, such as `std=group low=0.2`.

    If more settings differ than a name has room for, runs keep the names of their folders. The folders of a sweep have
    only numbers, so its runs are called by the first settings that tell them apart.
    """
    keys = [
        key for key in find_differing_keys(configs) if key not in _NAMES and all(key in config for config in configs)
    ]
    numbered = any(folder.rpartition("/")[2].isdecimal() for folder in folders)
    if len(keys) > _MOST_IN_NAME and not numbered:
        return list(folders)
    chosen = [key for key in keys if not _SEED.search(key)]
    if len(chosen) > _MOST_IN_NAME or _distinct(configs, chosen) < len(configs):
        candidates, chosen = sorted(keys, key=lambda key: bool(_SEED.search(key))), []
        for key in candidates:
            if _distinct(configs, [*chosen, key]) > _distinct(configs, chosen):
                chosen.append(key)
    if not chosen or len(chosen) > _MOST_IN_NAME or _distinct(configs, chosen) < len(configs):
        return list(folders)
    return [format_settings(config, chosen) for config in configs]


def format_settings(config: _Config, keys: Sequence[str]) -> str:
    """Return settings as text, by the shortest ends of their keys that differ, such as `std=group low=0.2`."""
    plain = [key.removesuffix("._target_") for key in keys]
    parts = []
    for key, full in zip(plain, keys, strict=True):
        words = key.split(".")
        ends = (".".join(words[-n:]) for n in range(1, len(words) + 1))
        short = next((end for end in ends if sum(f".{other}".endswith(f".{end}") for other in plain) == 1), key)
        value = _format_value(config, full)
        parts.append(f"{short}={value.rpartition('.')[2] if full.endswith('._target_') else value}")
    return " ".join(parts)


def mean(values: Sequence[float]) -> str:
    """Return the mean of the values of several seeds and its standard error, or the only value."""
    if len(values) < 2:
        return number(values[0]) if values else ""
    # Divided first, since the sum of very large values would be infinite; `hypot` is as careful with squares.
    center = sum(value / len(values) for value in values)
    if min(values) == max(values):
        return number(values[0])
    error = math.hypot(*(value - center for value in values)) / math.sqrt(len(values) * (len(values) - 1))
    return f"{number(center)} ± {error:.2g}"


def count_states(states: Sequence[str]) -> str:
    """Return the states of several runs: the state that all have, or the number of runs in each."""
    counts = Counter(states)
    return states[0] if len(counts) == 1 else ", ".join(f"{count} {state}" for state, count in counts.items())


def find_differing_keys(configs: Sequence[_Config]) -> list[str]:
    """Return the config keys whose values differ between runs, those that all runs have first."""
    keys = dict.fromkeys(key for config in configs for key in config)
    different = [key for key in keys if _distinct(configs, [key]) > 1]
    return sorted(different, key=lambda key: not all(key in config for config in configs))


def _distinct(configs: Sequence[_Config], keys: Sequence[str]) -> int:
    # As JSON, since a value can be a list, which has no hash.
    return len({json.dumps([config.get(key) for key in keys], default=str) for config in configs})


def _metrics(groups: Sequence[Sequence[Mapping[str, Any]]], heads: Sequence[str], width: int) -> list[RenderableType]:
    runs = [run for group in groups for run in group]
    rows: list[tuple[str, list[str]]] = [
        ("folder", [", ".join(run["key"] for run in group) for group in groups]),
        ("status", [count_states([run["status"]["state"] for run in group]) for group in groups]),
        ("steps", [_span([int((run["metrics"]["step"] or [0])[-1] or 0) for run in group]) for group in groups]),
        ("duration", [duration(_mean([_seconds(run) for run in group])) for group in groups]),
        ("warnings", [str(sum(len(run["warnings"]) for run in group)) for group in groups]),
    ]
    if rows[0][1] == heads:
        del rows[0]
    headline, others = _names(runs)
    rows += [(name, [_values(group, name) for group in groups]) for name in headline]
    further = [(name, [_values(group, name) for group in groups]) for name in others]
    # of these, what says something: the metrics in which they differ
    rows += [(name, row) for name, row in further if len(groups) == 1 or len({*row}) > 1]
    title = "Metrics: last (best, step)"
    title += "; of several seeds: mean ± standard error" if any(len(group) > 1 for group in groups) else ""
    tables = _tables(heads, rows, width)
    if len(tables) > 1:  # a row per run: all runs stand below each other, and the metrics continue in further tables
        lines = list(zip(heads, map(list, zip(*(cells for _, cells in rows), strict=True)), strict=True))
        tables = _tables([name for name, _ in rows], lines, width)
    spaced = [part for table in tables for part in (Text(), table)]
    return [Text(title, style="italic"), *spaced[1:], Text()]


def _seconds(run: Mapping[str, Any]) -> float:
    return max(0.0, (run["metrics"]["seconds"] or [0.0])[-1] or 0.0)


def _mean(values: Sequence[float]) -> float:
    return sum(value / len(values) for value in values)


def _span(values: Sequence[int]) -> str:
    return str(min(values)) if min(values) == max(values) else f"{min(values)} to {max(values)}"


def _names(runs: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the metrics that a run recorded: evaluations and the headline, and all others."""
    recorded = dict.fromkeys(
        name for run in runs for name in run["metrics"]["values"] if not is_noise(_values_of(run, name))
    )
    headline = [name for run in runs for name in run["info"]["headline"] if name in recorded]
    first = list(dict.fromkeys([*held_out_metrics(recorded), *headline]))
    return first, [name for name in recorded if name not in first]


def _values(group: Sequence[Mapping[str, Any]], name: str) -> str:
    """Return the last value of a metric, with the best one of a single run, or the mean over the runs of a group."""
    if len(group) == 1:
        return _course(group[0], name)
    lasts = [values[-1] for run in group if (values := _values_of(run, name))]
    return mean(lasts) + (f" (n={len(lasts)})" if 0 < len(lasts) < len(group) else "")


def _values_of(run: Mapping[str, Any], name: str) -> list[float]:
    return [x for x in run["metrics"]["values"].get(name, ()) if x is not None]


def _course(run: Mapping[str, Any], name: str) -> str:
    if not (values := _values_of(run, name)):
        return ""
    best = next(
        (metric for metric in run["summary"]["metrics"] if metric["name"] == name and metric["best"] is not None), None
    )
    end = f" ({number(best['best'])}, {best['best_step']})" if best is not None else ""
    return f"{number(values[-1])}{end}"


def _tables(heads: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], width: int) -> list[Table]:
    """Return columns with these heads, in as many tables below each other as `width` needs."""
    shown = [[_cell(cell) for cell in cells] for _, cells in rows]
    least = [min(_HEAD, _cell(head).cell_len) for head in heads]
    needed = [max(size, *(row[i].cell_len for row in shown)) for i, size in enumerate(least)]
    left = width - sum(size + _GAP for size in needed)
    # The first column gets what the others leave, but at least a third of the width.
    first = min(max(_cell(name).cell_len for name, _ in rows), max(width // 3, left))
    room = max(1, width - first - _GAP)
    needed = [min(room, size) for size in needed]
    parts: list[list[int]] = [[]]
    for i, size in enumerate(needed):
        if parts[-1] and sum(needed[j] + _GAP for j in parts[-1]) + size > room:
            parts.append([])
        parts[-1].append(i)
    tables = []
    for part in parts:
        table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
        table.add_column("", width=first, overflow="fold")
        for i in part:
            table.add_column(_cell(heads[i]), width=needed[i], overflow="fold")
        for (name, _), cells in zip(rows, shown, strict=True):
            table.add_row(_cell(name), *(cells[i] for i in part))
        tables.append(table)
    return tables


def _branches(runs: Sequence[Mapping[str, Any]], heads: Sequence[str]) -> list[Text]:
    """Return the differences of metrics between each fork and its parent, or between two forks of one step.

    Branches share prompts and random numbers, so their difference in a step has much less variance than that of two
    seeds.
    """
    lines = list[str]()
    for first, second in combinations(range(len(runs)), 2):
        if (fork := _shared_steps(runs[first], runs[second])) is None:
            continue
        curves = [_curves(Path(runs[i]["folder"])) for i in (first, second)]
        for name in itertools.chain(*_names([runs[first], runs[second]])):
            shared = sorted(step for step in curves[0].keys() & curves[1].keys() if step > fork)
            pairs = [(curves[0][step].get(name), curves[1][step].get(name)) for step in shared]
            differences = [b - a for a, b in pairs if a is not None and b is not None]
            if len(differences) > 1 and any(differences):
                between = f"{heads[second]} minus {heads[first]}"
                lines.append(f"{name}: {summarize_differences(differences)} in {len(differences)} steps ({between})")
    if not lines:
        return []
    title = "Branches of one run: mean difference ± standard error after the fork, paired by step"
    return [Text(title, style="italic"), *(Text(line, overflow="fold") for line in map(_plain, lines)), Text()]


def _shared_steps(first: Mapping[str, Any], second: Mapping[str, Any]) -> int | None:
    """Return the number of steps that two branches share; None if neither is a fork of the other or of its parent."""
    folders = [Path(run["folder"]).absolute() for run in (first, second)]
    forks = [parent_of(folder) for folder in folders]
    steps = [fork[1] if fork else 0 for fork in forks]
    # by id if there is one, since a run and its forks may be in other folders than before
    own = [(run["info"]["id"], folder) for run, folder in zip((first, second), folders, strict=True)]
    parents = [
        fork and ((run["info"]["parent"] or {}).get("id") or fork[0])
        for run, fork in zip((first, second), forks, strict=True)
    ]
    if parents[1] in own[0]:
        return steps[1]
    if parents[0] in own[1]:
        return steps[0]
    return min(steps) if parents[0] and parents[0] == parents[1] else None


def _curves(folder: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of all steps; a report has only some of them."""
    return {
        line["step"]: {name: float(x) for name, x in line.items() if isinstance(x, int | float)}
        for line in json_lines(folder / METRICS)
        if isinstance(line.get("step"), int)
    }


_BLOCKS = 10
"""Blocks of consecutive steps whose means count as independent. The differences of single steps are correlated."""


def summarize_differences(differences: Sequence[float]) -> str:
    """Return the mean of differences and its standard error, from the means of up to `_BLOCKS` blocks of steps."""
    n = min(_BLOCKS, len(differences))
    ends = [round(i * len(differences) / n) for i in range(n + 1)]
    return mean([_mean(differences[start:end]) for start, end in pairwise(ends)])


def _settings(configs: Sequence[_Config]) -> list[Text]:
    """Return a line for each setting that differs: `key: a -> b`, in the order of the runs."""
    different = [key for key in find_differing_keys(configs) if key not in _NAMES]
    keys = [key for key in different if all(key in config for config in configs)]
    lines = [f"{key}: {' -> '.join(_format_value(config, key) for config in configs)}" for key in keys[:_MOST_KEYS]]
    if len(keys) > _MOST_KEYS:
        lines.append(f"and {len(keys) - _MOST_KEYS} more")
    if rest := len(different) - len(keys):
        lines.append(f"{rest} {'key' if rest == 1 else 'keys'} of components that only some runs have")
    if not lines:
        return []
    return [Text("Settings that differ", style="italic"), *(Text(line, overflow="fold") for line in map(_plain, lines))]


def _plain(text: str) -> str:
    """Return a text of a run as one line that cannot control the terminal."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def _cell(text: str) -> Text:
    """Return a text of a run as one line that reaches neither the terminal's control sequences nor rich's markup."""
    return Text(_limit(_plain(text)), overflow="fold")


def _limit(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _format_value(config: _Config, key: str) -> str:
    return "" if key not in config else "null" if config[key] is None else _limit(str(config[key]))

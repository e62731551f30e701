"""`run_data`: everything that the report shows of one run, as plain values of limited size."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from realign.report.files import flat_config, json_lines, json_object
from realign.report.graph import graph_svg

POINTS = 600
"""Maximum number of points of a curve; longer runs are averaged over neighboring steps."""
BUDGETS: Mapping[str, int] = {
    "samples": 900_000,
    "eval_samples": 400_000,
    "tokens": 1_500_000,
    "spans": 600_000,
    "system": 200_000,
    "warnings": 100_000,
}
"""Maximum size of the records of each file in the report, in bytes of JSON. Steps in between are left out."""
LONGEST_TEXT = 4_000
"""Maximum length of a prompt or response, in characters; its middle is omitted."""
QUIET_S = 300.0
"""Seconds without a new record after which a run on another machine counts as ended."""


def run_data(folder: Path, key: str | None = None) -> dict[str, Any]:
    """Return the records of a run for the report.

    Args:
        folder: folder of the run.
        key: unique name of the run in the report; the name of the folder if unset.
    """
    info, summary = json_object(folder / "run.json"), json_object(folder / "summary.json")
    metrics = json_lines(folder / "metrics.jsonl")
    records = {name: json_lines(folder / f"{name}.jsonl") for name in BUDGETS}
    records["samples"], records["eval_samples"] = (
        [_shortened(record) for record in records[name]] for name in ("samples", "eval_samples")
    )
    return {
        "key": key or folder.name,
        "name": str(info.get("name") or summary.get("name") or folder.name),
        "folder": str(folder),
        "status": status(folder, info, summary),
        "info": {name: value for name, value in info.items() if name != "graph"},
        "summary": summary,
        "config": flat_config(folder / "config.yaml"),
        "metrics": columns(metrics),
        "graph": graph_svg(info.get("graph")),
        **{name: spread(found, BUDGETS[name]) for name, found in records.items()},
    }


def run_line(folder: Path, key: str) -> dict[str, Any]:
    """Return a short description of a run for the list of runs."""
    info, summary = json_object(folder / "run.json"), json_object(folder / "summary.json")
    metrics = json_lines(folder / "metrics.jsonl")
    found = columns(metrics)
    shown = next((name for name in (*_headline(info), *found["values"]) if name in found["values"]), None)
    attempts = info.get("attempts") or [{}]
    return {
        "key": key,
        "name": str(info.get("name") or summary.get("name") or folder.name),
        "status": status(folder, info, summary),
        "step": metrics[-1].get("step", 0) if metrics else 0,
        "steps": info.get("steps") or summary.get("steps"),
        "seconds": metrics[-1].get("seconds") if metrics else None,
        "started": attempts[0].get("started"),
        "metric": shown,
        "curve": found["values"].get(shown, []) if shown is not None else [],
    }


def _headline(info: Mapping[str, Any]) -> list[str]:
    names = [str(name) for name in info.get("headline", ())]
    return sorted(names, key=lambda name: not name.startswith("eval/"))


def status(folder: Path, info: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the state of a run: `running`, `killed`, or how its last attempt ended, with the reason."""
    attempts = info.get("attempts") or []
    if not attempts:
        return {"state": str(summary.get("status", "unknown")), "reason": str(summary.get("reason", ""))}
    last = attempts[-1]
    if last.get("ended"):
        return {"state": str(last.get("status")), "reason": str(last.get("reason", ""))}
    if last.get("host") == socket.gethostname():
        alive = _is_alive(last.get("pid"))
    else:
        newest = max((path.stat().st_mtime for path in folder.glob("*.jsonl")), default=0.0)
        alive = time.time() - newest < QUIET_S
    return {"state": "running" if alive else "killed", "reason": ""}


def _is_alive(pid: object) -> bool:
    if not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # a process of another user
        return True
    return True


def columns(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return metrics as columns: `step`, `seconds`, and one column for each metric, with null where it is missing."""
    names = list(dict.fromkeys(name for record in records for name in record))
    width = -(-len(records) // POINTS) if records else 1
    parts = [records[i : i + width] for i in range(0, len(records), width)]
    found = {name: [_mean(part, name) for part in parts] for name in names}
    steps, seconds = ([part[-1].get(name) for part in parts] for name in ("step", "seconds"))
    values = {name: column for name, column in found.items() if name not in ("step", "seconds")}
    return {"step": steps, "seconds": seconds, "values": values, "averaged": width}


def _mean(records: Iterable[Mapping[str, Any]], name: str) -> float | None:
    found = [x for record in records if isinstance(x := record.get(name), int | float) and math.isfinite(x)]
    return float(f"{sum(found) / len(found):.6g}") if found else None


def spread(records: Sequence[dict[str, Any]], budget: int) -> list[dict[str, Any]]:
    """Return the records of steps that are spread evenly over the run, at most `budget` bytes of JSON.

    The records of a step stay together. The first and the last step are kept, unless they exceed the budget alone.
    """
    steps: dict[Any, list[dict[str, Any]]] = {}
    for record in records:
        steps.setdefault(record.get("step"), []).append(record)
    groups = list(steps.values())
    sizes = [sum(len(json.dumps(record, ensure_ascii=False)) for record in group) for group in groups]
    count = len(groups)
    while count > 0:
        chosen = sorted({round(i * (len(groups) - 1) / max(1, count - 1)) for i in range(count)})
        if sum(sizes[i] for i in chosen) <= budget:
            return [record for i in chosen for record in groups[i]]
        count = count * 3 // 4
    return []


def _shortened(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample without the middle of very long texts. Its turns repeat the response, and are left out."""
    found = {name: value for name, value in record.items() if name != "turns"}
    for name in ("prompt", "response"):
        text = found.get(name)
        if isinstance(text, str) and len(text) > LONGEST_TEXT:
            half, omitted = LONGEST_TEXT // 2, len(text) - LONGEST_TEXT
            found[name] = f"{text[:half]}\n[... {omitted:,} characters omitted ...]\n{text[-half:]}"
    return found


__all__ = ["columns", "run_data", "run_line", "spread", "status"]

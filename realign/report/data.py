"""`run_data`: everything that the report shows of one run, as plain values of limited size."""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from realign.records.diagnosis import diagnosis_of
from realign.records.record_files import (
    METRICS,
    json_lines,
    json_object,
    lines,
    open_or_empty,
    parse_object,
)
from realign.report.files import flat_config, number, run_info, summary, usable
from realign.settings import Range, Settings

_POINTS = 600
"""Maximum number of points of a curve; longer runs are averaged over neighboring steps."""
SAMPLES_MB = 2.8
"""Size of samples and tokens in a report, in MB of JSON before compression."""
_SHARES: Mapping[str, float] = {"samples": 0.32, "eval_samples": 0.14, "tokens": 0.54}
"""Parts of `SAMPLES_MB`."""
_BUDGETS: Mapping[str, int] = {"spans": 600_000, "system": 200_000, "warnings": 100_000}
"""Maximum size of the other records, in bytes of JSON."""
_LONGEST_TEXT = 4_000
"""Maximum length of a prompt or response, in characters; its middle is omitted."""
MOST_NAMES = 2_000
"""Maximum number of metrics; the others are left out."""
_QUIET_S = 300.0
"""Seconds without a new record after which a run on another machine counts as ended."""


@dataclass
class ReportOptions(Settings):
    """Size of a report."""

    samples_mb: Annotated[float, Range(gt=0)] = SAMPLES_MB
    """Size of the samples and tokens of a run, in MB before compression. Of longer runs, some steps are shown."""


def run_data(
    folder: Path, key: str | None = None, samples_mb: float = SAMPLES_MB, metrics: Metrics | None = None
) -> dict[str, Any]:
    """Return the records of a run for the report.

    Args:
        folder: folder of the run.
        key: unique name of the run in the report; the name of the folder if unset.
        samples_mb: maximum size of its samples and tokens, in MB of JSON. Steps in between are left out.
        metrics: its metrics, if some were read before.
    """
    info, end = run_info(folder), summary(folder)
    budgets = {**{name: int(share * samples_mb * 1e6) for name, share in _SHARES.items()}, **_BUDGETS}
    records = {name: usable(name, json_lines(folder / f"{name}.jsonl")) for name in budgets}
    records["samples"], records["eval_samples"] = (
        [_shorten(record) for record in records[name]] for name in ("samples", "eval_samples")
    )
    shown = {name: spread(lines, budgets[name]) for name, lines in records.items()}
    curves = (metrics or Metrics(folder / METRICS)).update().columns()
    return {
        "key": key or folder.name,
        "name": info["name"] or end["name"] or folder.name,
        "folder": str(folder),
        "status": status(folder, info, end),
        "info": info,
        "summary": end,
        "config": flat_config(folder / "config.yaml"),
        "metrics": curves,
        "diagnosis": _diagnosis(folder),
        "steps_of": {
            name: [len({x.get("step") for x in some}) for some in (shown[name], records[name])] for name in _SHARES
        },
        "graph": graph_svg(json_object(folder / "run.json").get("graph")),
        **shown,
    }


def run_line(folder: Path, key: str, metrics: Metrics | None = None) -> dict[str, Any]:
    """Return a short description of a run for the list of runs; see `run_data` for the arguments."""
    info, end = run_info(folder), summary(folder)
    curves = (metrics or Metrics(folder / METRICS)).update().columns()
    headline = sorted(info["headline"], key=lambda name: not name.startswith("eval/"))
    shown = next((name for name in (*headline, *curves["values"]) if name in curves["values"]), None)
    return {
        "key": key,
        "name": info["name"] or end["name"] or folder.name,
        "folder": str(folder.absolute()),
        "id": info["id"],
        "parent": info["parent"] or {},
        "status": status(folder, info, end),
        "step": (curves["step"] or [0])[-1],
        "steps": info["steps"] or end["steps"],
        "seconds": (curves["seconds"] or [None])[-1],
        "started": info["attempts"][0]["started"] if info["attempts"] else "",
        "metric": shown,
        "curve": curves["values"].get(shown, []) if shown is not None else [],
        "last": {name: x for name, column in curves["values"].items() if (x := _last(column)) is not None},
        "config": flat_config(folder / "config.yaml"),
        "wrong": end["diagnosis"],
    }


def _last(column: Sequence[float | None]) -> float | None:
    return next((x for x in reversed(column) if x is not None), None)


def _diagnosis(folder: Path) -> dict[str, Any]:
    """Return what the page shows of a diagnosis."""
    diagnosis = diagnosis_of(folder)
    causes = [{**asdict(cause), "surety": cause.surety, "command": cause.command(folder)} for cause in diagnosis.causes]
    return {"sentence": diagnosis.sentence, "causes": causes}


def status(folder: Path, info: Mapping[str, Any], end: Mapping[str, Any]) -> dict[str, str]:
    """Return the state of a run, with the reason: `running`, `killed`, `unreadable`, or how its last attempt ended.

    Args:
        folder: folder of the run.
        info: its `run_info`.
        end: its `summary`.
    """
    if not info["attempts"]:
        if (folder / "run.json").exists() and not json_object(folder / "run.json"):
            return {"state": "unreadable", "reason": "run.json is damaged"}
        return {"state": end["status"] or "unknown", "reason": end["reason"]}
    last = info["attempts"][-1]
    if last["ended"]:
        return {"state": last["status"] or "unknown", "reason": last["reason"]}
    if last["host"] == socket.gethostname():
        alive = _is_alive(last["pid"])
    else:
        # A process on another machine cannot be asked, but a run records the load of its machine every 10 s by default.
        newest = max((path.lstat().st_mtime for path in folder.glob("*.jsonl")), default=0.0)
        alive = time.time() - newest < _QUIET_S
    return {"state": "running" if alive else "killed", "reason": ""}


def _is_alive(pid: float | None) -> bool:
    # The number is from a file: 0 and negative ones would mean groups of processes.
    if not isinstance(pid, int) or not 0 < pid < 2**31:
        return False
    try:
        os.kill(pid, 0)  # sends nothing; it only asks whether the process exists
    except ProcessLookupError:
        return False
    except OSError:  # a process of another user
        return True
    return True


class Metrics:
    """Metrics of a run, which grow with its file."""

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._lock = path, threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._read, self._last_line, self._records = 0, b"", 0
        self._shared: dict[str, array[float]] = {"step": array("d"), "seconds": array("d")}
        self._values: dict[str, tuple[array[int], array[float]]] = {}  # record and value
        self._left_out: set[str] = set()

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the metrics of a step."""
        for name, column in self._shared.items():
            column.append(math.nan if (x := number(record.get(name))) is None else x)
        for name, value in record.items():
            if name in self._shared or name == "settings":  # the hash of them
                continue
            if name not in self._values:
                if len(self._values) == MOST_NAMES:
                    self._left_out.add(name)
                    continue
                self._values[name] = (array("q"), array("d"))
            # without a call for the usual kind: a long run has millions of values
            if (x := value if type(value) is float and math.isfinite(value) else number(value)) is not None:
                records, values = self._values[name]
                records.append(self._records)
                values.append(x)
        self._records += 1

    def update(self) -> Metrics:
        """Add what was written to the file since the last call, and return this."""
        if self._path is not None:
            with self._lock, open_or_empty(self._path) as file:
                file.seek(self._read - len(self._last_line))
                if file.read(len(self._last_line)) != self._last_line:  # a resumed run cut or replaced the file
                    self._clear()
                for end, line in lines(file, self._read):
                    if line.endswith(b"\n"):  # else it is still being written
                        self._read, self._last_line = end, line
                        if record := parse_object(line):
                            self.add(record)
        return self

    def columns(self) -> dict[str, Any]:
        """Return `step`, `seconds`, and one column for each metric, with null where it is missing.

        Runs of more than `_POINTS` steps are averaged over neighboring ones. `left_out` counts the metrics beyond
        `MOST_NAMES`.
        """
        with self._lock:
            width = -(-self._records // _POINTS) or 1
            parts = -(-self._records // width)
            values: dict[str, list[float | None]] = {name: [None] * parts for name in self._values}
            for name, (records, xs) in self._values.items():
                part_of = np.array(records) // width
                counts = np.bincount(part_of, minlength=parts)
                sums = np.bincount(part_of, np.array(xs) / counts[part_of], minlength=parts)
                for place in counts.nonzero()[0].tolist():
                    values[name][place] = number(float(f"{sums[place]:.6g}"))
            ends = [min(end, self._records) - 1 for end in range(width, self._records + width, width)]
            shared = {name: [_whole(column[end]) for end in ends] for name, column in self._shared.items()}
            return {**shared, "values": values, "averaged": width, "left_out": len(self._left_out)}


def _whole(x: float) -> float | None:
    return int(x) if x.is_integer() else number(x)


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


def _shorten(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample without the middle of very long texts. Its turns repeat the response, and are left out."""
    shortened = {name: value for name, value in record.items() if name != "turns"}
    for name in ("prompt", "response"):
        text = shortened.get(name)
        if isinstance(text, str) and len(text) > _LONGEST_TEXT:
            half, omitted = _LONGEST_TEXT // 2, len(text) - _LONGEST_TEXT
            shortened[name] = f"{text[:half]}\n[... {omitted:,} characters omitted ...]\n{text[-half:]}"
    return shortened


def graph_svg(record: Any) -> str:
    """Return the graph of a run as SVG; empty if the record is missing or no valid graph."""
    if not record:
        return ""
    from realign.api import RPC, DataflowGraph, Sync
    from realign.draw import to_svg

    try:
        rpcs = [
            RPC(
                str(rpc["name"]),
                str(rpc["model"]),
                str(rpc["method"]),
                tuple(rpc["inputs"]),
                tuple(rpc["outputs"]),
                after=tuple(rpc["after"]),
            )
            for rpc in record["rpcs"]
        ]
        sync = {str(role): Sync(**values) for role, values in record["sync"].items()}
        return to_svg(DataflowGraph(tuple(rpcs), tuple(record["dataset_keys"]), tuple(record["results"]), sync))
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError):  # of another version, or by hand
        return ""


__all__ = ["SAMPLES_MB", "Metrics", "ReportOptions", "graph_svg", "run_data", "run_line", "spread", "status"]

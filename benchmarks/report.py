"""Shared functions of the benchmarks: alternating timings, `name=value` arguments, tables, and facts of the run."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar


class Seconds(NamedTuple):
    """Median seconds of a call."""

    wall: float
    """Wall-clock seconds."""
    cpu: float
    """CPU seconds of all threads of this process. Other programs hardly affect them."""


Key = TypeVar("Key")


def alternate(calls: Mapping[Key, Callable[[], object]], repeats: int, *, warm_up: bool = True) -> dict[Key, Seconds]:
    """Measure the median seconds of each call. Calls alternate, in an order that is reversed every round.

    Args:
        calls: Calls by name.
        repeats: Number of measured rounds.
        warm_up: Whether to run one round before, which is not measured.
    """
    times: dict[Key, list[tuple[float, float]]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for number in range(-int(warm_up), repeats):
            for name in list(calls) if number % 2 else list(calls)[::-1]:
                wall, cpu = time.perf_counter(), time.process_time()
                kept = calls[name]()  # excludes freeing the result from the timing
                spent = time.perf_counter() - wall, time.process_time() - cpu
                del kept
                if number >= 0:
                    times[name].append(spent)
    finally:
        gc.enable()
    return {name: Seconds(*map(statistics.median, zip(*rounds, strict=True))) for name, rounds in times.items()}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table. Columns are as wide as their longest cell; only the first one is aligned left."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def arguments(defaults: Mapping[str, str], given: Sequence[str] | None = None) -> dict[str, str]:
    """Parse `name=value` arguments of the command line over defaults. An unknown name ends the program."""
    words = dict(word.partition("=")[::2] for word in (sys.argv[1:] if given is None else given))
    if unknown := sorted(words.keys() - defaults.keys()):
        sys.exit(f"unknown argument {unknown[0]!r}; valid: {', '.join(defaults)}")
    return {**defaults, **words}


def facts() -> dict[str, Any]:
    """Return versions, threads and the load of the machine: the mean number of running processes over one minute."""
    import torch

    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }

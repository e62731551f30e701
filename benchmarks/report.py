"""What the benchmarks share: calls timed in alternation, arguments `name=value`, a table, facts of the run."""

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
    """Medians of one call."""

    wall: float
    """On the clock."""
    cpu: float
    """Of this process, all its threads together: other programs hardly change it."""


Key = TypeVar("Key")


def alternate(calls: Mapping[Key, Callable[[], object]], repeats: int, *, warm_up: bool = True) -> dict[Key, Seconds]:
    """Median seconds of each call; they take turns, in an order that is reversed from one round to the next.

    Args:
        calls: by name.
        repeats: rounds that are counted.
        warm_up: make a round before them that is not.
    """
    times: dict[Key, list[tuple[float, float]]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for number in range(-int(warm_up), repeats):
            for name in list(calls) if number % 2 else list(calls)[::-1]:
                wall, cpu = time.perf_counter(), time.process_time()
                kept = calls[name]()  # freeing the result is not part of the call
                spent = time.perf_counter() - wall, time.process_time() - cpu
                del kept
                if number >= 0:
                    times[name].append(spent)
    finally:
        gc.enable()
    return {name: Seconds(*map(statistics.median, zip(*found, strict=True))) for name, found in times.items()}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their longest cell, the first aligned left and the others right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def arguments(defaults: Mapping[str, str], given: Sequence[str] | None = None) -> dict[str, str]:
    """The words of the command line, each `name=value`, over the defaults; an unknown name ends the program."""
    words = dict(word.partition("=")[::2] for word in (sys.argv[1:] if given is None else given))
    if unknown := sorted(words.keys() - defaults.keys()):
        sys.exit(f"unknown argument {unknown[0]!r}; valid: {', '.join(defaults)}")
    return {**defaults, **words}


def facts() -> dict[str, Any]:
    """Versions, threads, and how busy the machine is: the mean number of running processes over a minute."""
    import torch

    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }

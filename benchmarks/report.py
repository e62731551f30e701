"""Shared functions of the benchmarks: `name=value` arguments, tables, and facts of the run."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any


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

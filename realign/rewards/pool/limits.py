"""Resource limits of the worker processes of the reward pool, and the replacement of workers that leak memory.

The limits contain accidents; they are no sandbox. `docs/security.md` lists what they do not prevent.
"""

from __future__ import annotations

import gc
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from realign.errors import SettingsError
from realign.settings import Count, Positive, Range, Settings

OpenFiles = Annotated[int, Range(ge=32)]
"""Number of file descriptors. Python itself needs 32."""


@dataclass(frozen=True)
class WorkerLimits(Settings):
    """Limits of one worker. The processes that the reward function starts inherit them."""

    memory_mb: Count | None = None
    """Address space in MiB, in addition to the worker's usage after importing the function; None sets no limit."""
    cpu_s: Positive | None = None
    """CPU seconds that one call may use, over all its threads; None sets no limit."""
    open_files: OpenFiles | None = None
    """Number of file descriptors, including sockets and pipes; None keeps the system's limit."""
    keep_environment: Sequence[str] = ()
    """Names of environment variables to inherit although they look like secrets."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.keep_environment, str):
            raise SettingsError(
                f"keep_environment={self.keep_environment!r}: must be a list of names of variables, not one text"
            )


def limits_memory() -> bool:
    """Return whether this platform enforces a memory limit."""
    return sys.platform == "linux"


def limit_process(limits: WorkerLimits) -> None:
    """Apply all limits except CPU time, which `allow_cpu` sets before each call. Also disables core files."""
    if sys.platform == "win32":
        return
    import resource

    _lower(resource.RLIMIT_CORE, 0)
    if limits.open_files is not None:
        _lower(resource.RLIMIT_NOFILE, limits.open_files)
    if limits.memory_mb is not None and limits_memory():
        # Address space, not resident memory: Linux ignores limits on the latter (RLIMIT_RSS).
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + limits.memory_mb * 2**20)


def _lower(kind: int, limit: int) -> None:
    """Lower the soft and the hard limit, so that the process cannot raise it again."""
    import resource

    hard = resource.getrlimit(kind)[1]
    lowered = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (lowered, lowered))


def allow_cpu(cpu_s: float | None) -> None:
    """Allow this process `cpu_s` more CPU seconds. The limit on its total CPU time is rounded up to whole seconds."""
    if cpu_s is None or sys.platform == "win32":
        return
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    limit = math.ceil(used.ru_utime + used.ru_stime + cpu_s)
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


KEPT = 0.5
"""Fraction of the memory free after the first call that a function may keep between two calls."""


class MemoryWatch:
    """Compares the memory of this process between two calls with its memory when it was first asked, after a call."""

    def __init__(self) -> None:
        self._after_first: int | None = None

    def leaks(self) -> bool:
        """Return whether the process keeps more memory than `KEPT` allows; False without a memory limit."""
        if not limits_memory():
            return False
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            return False
        if self._after_first is None:
            self._after_first = _address_space()
            return False
        most = self._after_first + KEPT * (limit - self._after_first)
        if _address_space() <= most:
            return False
        # Cycles that Python has not collected yet are no leak.
        gc.collect()
        return _address_space() > most


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")

"""Replace a worker whose reward function leaks memory, before its calls fail from lack of memory."""

from __future__ import annotations

import functools
import gc
import os
from pathlib import Path
from typing import NoReturn

from realign.rewards.pool.limits import limits_memory

RETIRED = 71
"""Exit code of a worker that must be replaced. It has not started the items it received."""
KEPT = 0.5
"""Fraction of the memory free after the first call that a function may keep between two calls."""


class MemoryWatch:
    """Compares the memory of this process between two calls with its memory after the first call."""

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
        gc.collect()
        return _address_space() > most

    @property
    def called(self) -> bool:
        """Whether a call has finished."""
        return self._after_first is not None


@functools.lru_cache(maxsize=1)
def watch() -> MemoryWatch:
    """Return the memory watch of this process."""
    return MemoryWatch()


def retire() -> NoReturn:
    """Exit this worker, so that the pool replaces it. Its keeper kills the processes that it started."""
    os._exit(RETIRED)


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")

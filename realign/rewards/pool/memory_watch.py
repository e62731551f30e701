"""A worker whose function keeps memory from call to call is replaced before calls fail for want of it."""

from __future__ import annotations

import functools
import gc
import os
import signal
from pathlib import Path
from typing import NoReturn

from realign.rewards.pool.limits import limits_memory

RETIRED = 71
"""Exit code of a worker that asks to be replaced: it has not begun what it was given."""
KEPT = 0.5
"""Part of the memory left after the first call that may be kept between two calls."""


class MemoryWatch:
    """What this process holds between two calls, against what it held after the first."""

    def __init__(self) -> None:
        self._after_first: int | None = None

    def leaks(self) -> bool:
        """Whether more is kept than `KEPT` allows; asked after each call. Never without a memory limit."""
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
        """Whether a call was made."""
        return self._after_first is not None


@functools.lru_cache(maxsize=1)
def watch() -> MemoryWatch:
    """The watch of this process."""
    return MemoryWatch()


def retire() -> NoReturn:
    """End this worker and what it started, so that it is replaced."""
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
    os._exit(RETIRED)


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")

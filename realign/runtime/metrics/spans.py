"""`Spans`: start and end of the calls and phases of a run, collected in memory until a step writes them."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MOST = 5_000
"""Maximum number of spans between two writes; older ones are dropped."""


class Spans:
    """Collects spans from any thread. The clock counts seconds since the Unix epoch, but never jumps."""

    def __init__(self) -> None:
        self._done: deque[dict[str, Any]] = deque(maxlen=MOST)
        self._offset = time.time() - time.perf_counter()
        self._process = os.getpid()

    @contextmanager
    def span(self, name: str, kind: str) -> Iterator[None]:
        """Record the duration of the context.

        Args:
            name: name of the call or phase, such as `actor_train`.
            kind: method of a call (`generate`, `inference`, `train_step`), or `phase`.
        """
        started = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            self._done.append(
                {
                    "name": name,
                    "kind": kind,
                    "start": round(started + self._offset, 6),
                    "end": round(ended + self._offset, 6),
                    "thread": threading.current_thread().name,
                    "process": self._process,
                }
            )

    def take(self) -> list[dict[str, Any]]:
        """Return the spans that ended since the last call, in the order of their start."""
        found = []
        while self._done:
            found.append(self._done.popleft())
        return sorted(found, key=lambda span: span["start"])


__all__ = ["Spans"]

"""`Tally`: failures of several calls of a reward pool that judge the parts of one batch.

A pool stops the run when more than a fraction of a batch fails. Where a batch is judged prompt by prompt, one bad row
would be all of its call, and must not be taken for all of the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Tally:
    """Counts the failures of the latest calls, as many as make up a batch. Threads may share one."""

    def __init__(self, parts: int) -> None:
        """Of batches that are judged in so many calls."""
        self.parts = parts
        self._past: deque[int] = deque(maxlen=max(0, parts - 1))

    def add(self, failures: int) -> None:
        """Count a call that has ended."""
        self._past.append(failures)

    @property
    def failures(self) -> int:
        """Of the latest calls: with one more call, as many as a batch has."""
        return sum(list(self._past))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside this context, and this thread, calls of a pool are parts of a batch."""
        token = _PRESENT.set(self)
        try:
            yield
        finally:
            _PRESENT.reset(token)


_PRESENT: ContextVar[Tally | None] = ContextVar("tally", default=None)


def present_tally() -> Tally:
    """Of the context at hand; outside of any, a call is a batch."""
    return _PRESENT.get() or Tally(1)

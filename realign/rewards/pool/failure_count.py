"""`Tally`: counts failures over several calls of a reward pool that score the parts of one batch.

A pool stops the run when more than a fraction of a batch fails. If a batch is scored prompt by prompt, one bad row can
fail a whole call. That call must not count as a whole batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Tally:
    """Counts the failures of the latest calls that together score one batch. Threads may share a tally."""

    def __init__(self, parts: int) -> None:
        """Create a tally for batches that are scored in `parts` calls."""
        self.parts = parts
        self._past: dict[Hashable, deque[int]] = {}

    def add(self, failures: int, of: Hashable = None) -> None:
        """Add the number of failures of a finished call of `of`, such as one of several reward functions."""
        self._past.setdefault(of, deque(maxlen=max(0, self.parts - 1))).append(failures)

    def failures(self, of: Hashable = None) -> int:
        """Return the failures of the last `parts - 1` calls of `of`; the current call completes the batch."""
        return sum(list(self._past.get(of, ())))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the pool calls of this thread as parts of a batch, inside this context."""
        token = _PRESENT.set(self)
        try:
            yield
        finally:
            _PRESENT.reset(token)


_PRESENT: ContextVar[Tally | None] = ContextVar("tally", default=None)


def present_tally() -> Tally:
    """Return the tally of the current context. Outside any context every call counts as a whole batch."""
    return _PRESENT.get() or Tally(1)

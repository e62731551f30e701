"""What the driver is doing, and how much of its time went by on the way to workers and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class Hops:
    """The hops of one call of the graph: it may ask workers several times."""

    name: str
    """Of the call."""
    seconds: float = 0.0
    """In which no worker computed for it: pickling, transfer, and waiting for workers that another call has."""


_CURRENT: ContextVar[Hops | None] = ContextVar("hops", default=None)


@contextmanager
def counted_hops(name: str) -> Iterator[Hops]:
    """Inside this context, and in this thread, hops are those of the call `name`."""
    hops = Hops(name)
    token = _CURRENT.set(hops)
    try:
        yield hops
    finally:
        _CURRENT.reset(token)


def current_hops() -> Hops | None:
    """Of the call that is being made, if there is one."""
    return _CURRENT.get()

"""Measure the RPC overhead of each call of the graph: the time outside of the workers' computation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class Hops:
    """RPC overhead of one call of the graph, which may send several requests to workers."""

    name: str
    """Name of the call."""
    seconds: float = 0.0
    """Seconds without computation in a worker: pickling, transfer, and waiting for workers that another call uses."""


_CURRENT: ContextVar[Hops | None] = ContextVar("hops", default=None)


@contextmanager
def counted_hops(name: str) -> Iterator[Hops]:
    """Attribute the RPC overhead of this context and thread to the call `name`."""
    hops = Hops(name)
    token = _CURRENT.set(hops)
    try:
        yield hops
    finally:
        _CURRENT.reset(token)


def current_hops() -> Hops | None:
    """Return the RPC overhead record of the current call; None outside of a call."""
    return _CURRENT.get()

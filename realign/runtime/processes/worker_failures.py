"""Failures of worker processes."""

from __future__ import annotations


class WorkerLost(RuntimeError):
    """A worker process has died: killed, out of memory, or with its machine. The run continues from a checkpoint."""


class WorkerHangs(RuntimeError):
    """A worker process did not answer a call of the graph in time."""

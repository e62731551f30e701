"""Failures of worker processes."""

from __future__ import annotations


class WorkerLost(RuntimeError):
    """A worker process died: killed, out of memory, or its machine failed. The run continues from a checkpoint."""


class WorkerHangs(RuntimeError):
    """A worker process did not complete a call of the graph within the time limit."""

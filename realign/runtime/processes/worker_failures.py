"""Failures of worker processes."""

from __future__ import annotations

from realign.errors import TransientError


class WorkerLost(TransientError):
    """A worker process died: killed, out of memory, or its machine failed. The run continues from a checkpoint."""


class WorkerHangs(TransientError):
    """A worker process did not complete a call of the graph within the time limit."""

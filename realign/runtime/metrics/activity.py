"""Describe what a run is doing, for the live display."""

from __future__ import annotations

from collections.abc import Mapping

from realign.api import DataflowGraph, ModelInterface
from realign.runtime.processes.operations import Watch


def activity(watch: Watch, graph: DataflowGraph, interfaces: Mapping[str, ModelInterface], *, first_step: bool) -> str:
    """Return the current operation and its duration; empty between two operations.

    Args:
        watch: tracks the operations.
        graph: names the calls.
        interfaces: tell which calls run functions in worker processes instead of a model.
        first_step: whether no step is finished yet, so that calls may wait for workers to start.
    """
    operations = watch.operations()
    if not operations:
        return ""
    current = operations[-1]
    starts = ""
    for rpc in graph.rpcs:
        if first_step and current.what == f"call {rpc.name!r}":
            starts = "" if interfaces[rpc.model].needs_engine else ", which starts its workers"
            starts = f" for the first time{starts}"
    return f"running {current.what}{starts}, {current.seconds:.0f} s"


__all__ = ["activity"]

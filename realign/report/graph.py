"""`graph_svg`: draw the dataflow graph that run.json contains."""

from __future__ import annotations

from typing import Any


def graph_svg(record: Any) -> str:
    """Return the graph of a run as SVG; empty if the record is missing or no valid graph."""
    if not record:
        return ""
    from realign.api import RPC, DataflowGraph, Sync
    from realign.draw import to_svg

    try:
        rpcs = [
            RPC(
                str(rpc["name"]),
                str(rpc["model"]),
                str(rpc["method"]),
                tuple(rpc["inputs"]),
                tuple(rpc["outputs"]),
                after=tuple(rpc["after"]),
            )
            for rpc in record["rpcs"]
        ]
        sync = {str(role): Sync(**values) for role, values in record["sync"].items()}
        return to_svg(DataflowGraph(tuple(rpcs), tuple(record["dataset_keys"]), tuple(record["results"]), sync))
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError):  # of another version, or by hand
        return ""


__all__ = ["graph_svg"]

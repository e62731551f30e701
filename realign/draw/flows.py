"""Edges of a rendered graph: the keys that calls pass to each other, grouped into bundles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from realign.api import RPC, DataflowGraph

DATASET = "dataset"
COLOURS = (
    ("#dbeafe", "#2563eb"),
    ("#dcfce7", "#16a34a"),
    ("#ffedd5", "#ea580c"),
    ("#f3e8ff", "#9333ea"),
    ("#fce7f3", "#db2777"),
    ("#ccfbf1", "#0d9488"),
    ("#fef9c3", "#ca8a04"),
    ("#e2e8f0", "#475569"),
)
"""Fill and stroke colors of the roles, in the order of the graph."""
GREY = ("#f8fafc", "#64748b")
NO_NOTES: Mapping[str, str] = MappingProxyType({})


class Kind(StrEnum):
    """Kind of a bundle of keys."""

    data = "data"
    order = "order"
    kept = "kept for reports"
    unread = "unread"
    sync = "sync"


class Flow(NamedTuple):
    """A bundle of keys that one call (or the dataset) passes to other calls.

    A flow without keys is an order-only dependency. A flow without targets has no call that reads it. The keys of a
    sync describe how the weights of `role` are updated at the end of the step.
    """

    source: str
    keys: tuple[str, ...]
    targets: tuple[str, ...]
    kind: Kind
    role: str = ""


def flows(graph: DataflowGraph) -> list[Flow]:
    """Return every bundle once: calls that read the same keys of one source share a bundle.

    Skips order-only dependencies that other edges imply.
    """
    targets: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for rpc in graph.order:
        own = tuple(key for key in rpc.inputs if key in graph.dataset_keys)
        if own:
            targets.setdefault((DATASET, own), []).append(rpc.name)
        for source, keys in graph.edges[rpc.name].items():
            if keys or not _reaches(graph, source, rpc.name):
                targets.setdefault((source, keys), []).append(rpc.name)
    found = [
        Flow(source, keys, tuple(names), Kind.data if keys else Kind.order) for (source, keys), names in targets.items()
    ]
    unread = set(graph.unread())
    read = {key for rpc in graph.rpcs for key in rpc.inputs}
    for rpc in graph.order:
        for kind, keys in (
            (Kind.kept, tuple(k for k in rpc.outputs if k in graph.results and k not in read)),
            (Kind.unread, tuple(k for k in rpc.outputs if k in unread)),
        ):
            if keys:
                found.append(Flow(rpc.name, keys, (), kind))
    for role, sync in graph.sync.items():
        source = [rpc.name for rpc in graph.order if rpc.model == sync.of and rpc.method == "train_step"][-1]
        found.append(Flow(source, tuple(sync.describe().split(", ")), (), Kind.sync, role))
    place = {name: i for i, name in enumerate((DATASET, *(rpc.name for rpc in graph.order)))}
    return sorted(found, key=lambda flow: place[flow.source])


def detail(rpc: RPC, notes: Mapping[str, str]) -> str:
    """Return the second line in the box of a call: its role, its method, and the note on the role."""
    return " · ".join([rpc.model, rpc.method, *([notes[rpc.model]] if rpc.model in notes else [])])


def colours(rpcs: Sequence[RPC]) -> dict[str, tuple[str, str]]:
    """Return the fill and stroke colors of each role."""
    roles = dict.fromkeys(rpc.model for rpc in rpcs)
    return {role: COLOURS[i % len(COLOURS)] for i, role in enumerate(roles)}


def _reaches(graph: DataflowGraph, source: str, target: str) -> bool:
    """Return whether an indirect path leads from `source` to `target`."""
    ahead = [name for name in graph.edges[target] if name != source]
    seen: set[str] = set()
    while ahead:
        name = ahead.pop()
        if name == source:
            return True
        if name not in seen:
            seen.add(name)
            ahead.extend(graph.edges[name])
    return False

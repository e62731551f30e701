"""What there is to draw: which keys go from whom to whom, each bundle once."""

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
"""Fill and stroke of a role; roles take them in the order of the graph."""
GREY = ("#f8fafc", "#64748b")
NO_NOTES: Mapping[str, str] = MappingProxyType({})


class Kind(StrEnum):
    """What a bundle of keys is."""

    data = "data"
    order = "order"
    kept = "kept for reports"
    unread = "unread"
    sync = "sync"


class Flow(NamedTuple):
    """Keys that go together from one call (or the dataset) to others; no keys: a pure order; no targets: an end.

    Of a sync the keys say what becomes of the weights of `role`, at the end of the step.
    """

    source: str
    keys: tuple[str, ...]
    targets: tuple[str, ...]
    kind: Kind
    role: str = ""


def flows(graph: DataflowGraph) -> list[Flow]:
    """Every bundle once: calls that read the same keys of one source share it. An order that data imply is left out."""
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
    """Second line of the box of a call: its role, its method, and what there is to say about the role."""
    return " · ".join([rpc.model, rpc.method, *([notes[rpc.model]] if rpc.model in notes else [])])


def colours(rpcs: Sequence[RPC]) -> dict[str, tuple[str, str]]:
    """Fill and stroke of each role."""
    roles = dict.fromkeys(rpc.model for rpc in rpcs)
    return {role: COLOURS[i % len(COLOURS)] for i, role in enumerate(roles)}


def _reaches(graph: DataflowGraph, source: str, target: str) -> bool:
    """Whether another way than the direct edge leads from `source` to `target`."""
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

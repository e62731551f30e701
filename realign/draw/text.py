"""Render a graph as text for the terminal, and as Mermaid for Markdown pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from realign.draw.flows import DATASET, GREY, NO_NOTES, Flow, Kind, colours, detail, flows

if TYPE_CHECKING:
    from realign.api import DataflowGraph


def to_text(graph: DataflowGraph, notes: Mapping[str, str] = NO_NOTES) -> str:
    """Return the calls in execution order; below each call, the calls that read its keys.

    Args:
        graph: The graph to render.
        notes: Additional text by role, shown with its calls.
    """
    every = flows(graph)
    lines: list[str] = []
    if any(flow.source == DATASET for flow in every):
        lines += [DATASET, *_branches(every, DATASET), ""]
    for number, rpc in enumerate(graph.order, 1):
        note = f": {notes[rpc.model]}" if rpc.model in notes else ""
        lines += [f"{number}. {rpc.name}   ({rpc.model}.{rpc.method}{note})", *_branches(every, rpc.name), ""]
    return "\n".join(lines)


def _branches(every: list[Flow], source: str) -> list[str]:
    own = [flow for flow in every if flow.source == source]
    width = max((len(", ".join(flow.keys)) for flow in own if flow.targets), default=0)
    lines = []
    for i, flow in enumerate(own):
        corner = "└─" if i == len(own) - 1 else "├─"
        keys = ", ".join(flow.keys)
        end = {
            Kind.data: f"{keys:<{width}} ──▶ {', '.join(flow.targets)}",
            Kind.order: f"{'(order only)':<{width}} ┄┄▶ {', '.join(flow.targets)}",
            Kind.kept: f"{keys}  (kept for reports)",
            Kind.unread: f"{keys}  (unread)",
            Kind.sync: f"weights ══▶ {flow.role}  ({keys})",
        }[flow.kind]
        lines.append(f"   {corner} {end}")
    return lines


def to_mermaid(graph: DataflowGraph, notes: Mapping[str, str] = NO_NOTES) -> str:
    """Return a Mermaid flowchart: boxes colored by role, edges labeled with keys, order-only dependencies dashed.

    Args:
        graph: The graph to render.
        notes: Additional text by role, shown in the boxes of its calls.
    """
    every = flows(graph)
    node = {rpc.name: f"n{i}" for i, rpc in enumerate(graph.order)} | {DATASET: DATASET}
    style = colours(graph.order)
    ends = [flow for flow in every if not flow.targets]
    synced = {flow.role: [f"end{number}"] for number, flow in enumerate(ends) if flow.kind is Kind.sync}
    lines = ["flowchart TD"]
    if any(flow.source == DATASET for flow in every):
        lines.append(f"  {DATASET}[({DATASET})]")
    for rpc in graph.order:
        lines.append(f'  {node[rpc.name]}["<b>{_quote(rpc.name)}</b><br/>{_quote(detail(rpc, notes))}"]')
    for number, flow in enumerate(ends):
        if flow.kind is Kind.sync:
            lines.append(f'  end{number}[("weights of {_quote(flow.role)}")]')
            lines.append(f'  {node[flow.source]} == "{_keys(flow)}" ==> end{number}')
            continue
        lines.append(f'  end{number}>"{flow.kind.value}"]')
        lines.append(f'  {node[flow.source]} -. "{_keys(flow)}" .-> end{number}')
    for flow in every:
        for target in flow.targets:
            arrow = f'-- "{_keys(flow)}" -->' if flow.keys else "-.->"
            lines.append(f"  {node[flow.source]} {arrow} {node[target]}")
    for i, (role, (fill, stroke)) in enumerate(style.items()):
        members = ",".join([*(node[rpc.name] for rpc in graph.order if rpc.model == role), *synced.get(role, [])])
        lines.append(f"  classDef role{i} fill:{fill},stroke:{stroke},color:#0f172a")
        lines.append(f"  class {members} role{i}")
    if any(flow.source == DATASET for flow in every):
        lines.append(f"  style {DATASET} fill:{GREY[0]},stroke:{GREY[1]},color:#0f172a")
    return "\n".join(lines) + "\n"


def _keys(flow: Flow) -> str:
    return "<br/>".join(map(_quote, flow.keys))


def _quote(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "#quot;")

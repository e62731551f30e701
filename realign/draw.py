"""Render a `DataflowGraph` as text, Mermaid or SVG. All renderers are pure functions that return a string."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from realign.api import DataflowGraph

DATASET = "dataset"
COLORS = (
    *(("#dbeafe", "#2563eb"), ("#dcfce7", "#16a34a"), ("#ffedd5", "#ea580c"), ("#f3e8ff", "#9333ea")),
    *(("#fce7f3", "#db2777"), ("#ccfbf1", "#0d9488"), ("#fef9c3", "#ca8a04"), ("#e2e8f0", "#475569")),
)
"""Fill and stroke colors of the roles, in the order of the graph."""
GREY, INK, MUTED = ("#f8fafc", "#64748b"), "#0f172a", "#64748b"
FONT = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
HEAD, LINE, GAP_X, GAP_Y, MARGIN = 48, 14, 64, 24, 24
"""Pixels of the SVG: the head of a box, a line of text, gaps between columns and between boxes, and the edge."""
_NO_NOTES: Mapping[str, str] = MappingProxyType({})


class Flow(NamedTuple):
    """A bundle of keys that one call (or the dataset) passes to others; without keys, an order-only dependency.

    Without targets, `note` says why no call reads the keys, or that `role` takes the weights as the keys describe.
    """

    source: str
    keys: tuple[str, ...]
    targets: tuple[str, ...] = ()
    note: tuple[str, ...] = ()
    role: str = ""


def flows(graph: DataflowGraph) -> list[Flow]:
    """Return every bundle once for all calls that read it, without an order that other edges imply."""
    targets: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    before: dict[str, set[str]] = {}
    for rpc in graph.order:
        edges = graph.edges[rpc.name]
        before[rpc.name] = {*edges}.union(*(before[name] for name in edges))
        if own := tuple(key for key in rpc.inputs if key in graph.dataset_keys):
            targets.setdefault((DATASET, own), []).append(rpc.name)
        for source, keys in edges.items():
            if keys or not any(source in before[name] for name in edges):
                targets.setdefault((source, keys), []).append(rpc.name)
    bundles = [Flow(source, keys, (*names,)) for (source, keys), names in targets.items()]
    read = {key for rpc in graph.rpcs for key in rpc.inputs}
    for rpc in graph.order:
        for note, kept in (("(kept for reports)", graph.results), ("(unread)", graph.unread())):
            bundles.append(Flow(rpc.name, tuple(k for k in rpc.outputs if k in kept and k not in read), note=(note,)))
    for role, sync in graph.sync.items():
        # The weights are final after the last call that trains them.
        source = [rpc.name for rpc in graph.order if rpc.model == sync.of and rpc.method == "train_step"][-1]
        bundles.append(Flow(source, tuple(sync.describe().split(", ")), (), (f"weights of {role}",), role))
    return sorted((f for f in bundles if f.keys or f.targets), key=lambda f: [DATASET, *before].index(f.source))


def _boxes(graph: DataflowGraph, notes: Mapping[str, str]) -> dict[str, tuple[str, str, tuple[str, str]]]:
    """Return role, details and colors of the dataset, if calls read it, and of each call in execution order."""
    roles = list(dict.fromkeys(rpc.model for rpc in graph.order))
    boxes = {DATASET: ("", "rows of prompts", GREY)} if any(flow.source == DATASET for flow in flows(graph)) else {}
    for rpc in graph.order:
        note = [notes[rpc.model]] if rpc.model in notes else []
        color = COLORS[roles.index(rpc.model) % len(COLORS)]
        boxes[rpc.name] = (rpc.model, " · ".join([rpc.model, rpc.method, *note]), color)
    return boxes


def to_text(graph: DataflowGraph, notes: Mapping[str, str] = _NO_NOTES) -> str:
    """Return the calls in execution order, below each what it passes to which calls. `notes` are texts by role."""
    boxes, lines = _boxes(graph, notes), list[str]()
    for number, (name, (role, detail, _)) in enumerate(boxes.items(), 0 if DATASET in boxes else 1):
        lines.append(f"{number}. {name}   ({detail})" if role else DATASET)
        own = [flow for flow in flows(graph) if flow.source == name]
        width = max((len(", ".join(flow.keys)) for flow in own if flow.targets), default=0)
        for flow in own:
            keys = ", ".join(flow.keys)
            arrow = f"{keys:<{width}} ──▶ " if keys else f"{'(order only)':<{width}} ┄┄▶ "
            end = f"weights ══▶ {flow.role}  ({keys})" if flow.role else f"{keys}  {' '.join(flow.note)}"
            end = arrow + ", ".join(flow.targets) if flow.targets else end
            lines.append(f"   {'└─' if flow is own[-1] else '├─'} {end}")
        lines.append("")
    return "\n".join(lines)


def to_mermaid(graph: DataflowGraph, notes: Mapping[str, str] = _NO_NOTES) -> str:
    """Return a Mermaid flowchart: boxes colored by role, edges labeled with keys. `notes` are texts by role."""

    def quote(text: str) -> str:
        return escape(text, quote=False).replace('"', "#quot;")  # Mermaid's own entity: a quote would end the label

    boxes, lines = _boxes(graph, notes), ["flowchart TD"]
    nodes = {name: f"n{i}" for i, name in enumerate(boxes)}
    members: dict[str, list[str]] = {role: [] for role, *_ in boxes.values()}
    for name, (role, detail, _) in boxes.items():
        members[role].append(nodes[name])
        box = f'["<b>{quote(name)}</b><br/>{quote(detail)}"]' if role else f"[({name})]"
        lines.append(f"  {nodes[name]}{box}")
    for i, flow in enumerate(flows(graph)):
        keys, source = "<br/>".join(map(quote, flow.keys)), nodes[flow.source]
        arrow = f'-- "{keys}" -->' if keys else "-.->"
        lines += [f"  {source} {arrow} {nodes[target]}" for target in flow.targets]
        if flow.role:
            members[flow.role].append(f"end{i}")
        for note in map(quote, flow.note):
            end = f'== "{keys}" ==> end{i}[("{note}")]' if flow.role else f'-. "{keys}" .-> end{i}>"{note}"]'
            lines.append(f"  {source} {end}")
    style = {role: color for role, _, color in boxes.values()}
    for i, (role, names) in enumerate(members.items()):
        lines.append(f"  classDef role{i} fill:{style[role][0]},stroke:{style[role][1]},color:{INK}")
        lines.append(f"  class {','.join(names)} role{i}")
    return "\n".join(lines) + "\n"


@dataclass(eq=False)
class _Item:
    """A box, or a slot of height 0 in which a line passes a column; `coming` is the y where each line comes from."""

    height: int = 0
    width: float = 0.0
    x: float = 0.0
    y: float = 0.0
    coming: dict[Flow, float] = field(default_factory=dict)


def to_svg(graph: DataflowGraph, notes: Mapping[str, str] = _NO_NOTES) -> str:
    """Return an SVG image: a column per level, the keys in their boxes. `notes` are texts by role."""
    boxes, bundles, level = _boxes(graph, notes), flows(graph), {DATASET: 0}
    columns: list[list[_Item]] = [[] for _ in range(len(graph.order) + 1)]
    items, ports, links = dict[str, _Item](), dict[Flow, float](), list[tuple[Flow, _Item, _Item]]()
    for name, (_, detail, _) in boxes.items():
        level[name] = 1 + max((level[other] for other in graph.edges[name]), default=0) if name != DATASET else 0
        own = [flow for flow in bundles if flow.source == name]
        texts = [detail, *(text for flow in own for text in (*flow.keys, *flow.note))]
        items[name] = item = _Item(HEAD, 32 + max(8.6 * len(name), *(6.8 * len(text) for text in texts)))
        columns[level[name]].append(item)
        for flow in own:
            height = LINE * len(flow.keys + flow.note)
            ports[flow] = item.height + height / 2 if flow.keys else HEAD / 2
            item.height += height + 12 if flow.keys else 0
        item.height = max(item.height, 12 * (1 + sum(name in flow.targets for flow in bundles)))
    for flow in bundles:
        chain = {level[flow.source]: items[flow.source]}
        for i in range(level[flow.source] + 1, max((level[target] for target in flow.targets), default=0)):
            chain[i] = _Item()
            columns[i].append(chain[i])
            links.append((flow, chain[i - 1], chain[i]))
        links += [(flow, chain[level[target] - 1], items[target]) for target in flow.targets]
    bottom, right = max(sum(item.height + GAP_Y for item in column) for column in columns), float(MARGIN)
    for column in filter(None, columns):
        column.sort(key=lambda item: sum(item.coming.values()) / max(len(item.coming), 1))
        y, width = MARGIN + (bottom - sum(item.height + GAP_Y for item in column)) / 2, max(i.width for i in column)
        for item in column:
            item.x, item.y, item.width = right, y, width
            y += item.height + GAP_Y
        right += width + GAP_X
        for flow, left, item in (link for link in links if link[1] in column):
            item.coming[flow] = left.y + (ports[flow] if left.height else 0)
    body, roles = list[str](), {role: color for role, _, color in boxes.values()}
    for flow, left, item in links:  # lines bend only between columns, so they cross no box
        x1, y1, x2, past = left.x + left.width, item.coming[flow], item.x - 7, 0 if item.height else item.width + 7
        y2 = item.y + item.height * (1 + sorted(item.coming.values()).index(y1)) / (1 + len(item.coming))
        path = f"M{x1:g} {y1:g}C{x1 + 30:g} {y1:g} {x2 - 30:g} {y2:g} {x2:g} {y2:g}h{past:g}"
        color, dash = boxes[flow.source][2][1], "" if flow.keys else ' stroke-dasharray="4 4"'
        body.append(f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.6"{dash}/>')
        body += [f'<path d="M{item.x:g} {y2:g}l-9 -4.5v9z" fill="{color}"/>'] if item.height else []
    for name, (_, detail, (fill, stroke)) in boxes.items():
        item, middle = items[name], items[name].x + items[name].width / 2
        body.append("<g>" + _rect(item.x, item.y, item.width, item.height, fill, stroke))
        body += [_text(middle, item.y + 20, name, INK, 14), _text(middle, item.y + 36, detail, MUTED)]
        for flow in (flow for flow in bundles if flow.source == name and flow.keys):
            lines, colors = flow.keys + flow.note, roles[flow.role] if flow.role else ("#ffffff", stroke)
            y = item.y + ports[flow] - LINE * len(lines) / 2
            body.append(_rect(item.x + 8, y - 3, item.width - 16, LINE * len(lines) + 6, *colors))
            body += [_text(middle, y + 11 + LINE * i, t, INK if t in flow.keys else MUTED) for i, t in enumerate(lines)]
        body.append("</g>")
    w, h = f"{right - GAP_X + MARGIN:g}", f"{bottom - GAP_Y + 2 * MARGIN:g}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" role="img" '
    head += f'font-family="{FONT}"><rect width="100%" height="100%" fill="#ffffff"/><g>'
    return "\n".join([head, *body, "</g></svg>", ""])


def _rect(x: float, y: float, width: float, height: float, fill: str, stroke: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="{stroke}"/>'


def _text(x: float, y: float, text: str, color: str, size: int = 11) -> str:
    style = f'font-size="{size}" fill="{color}"' + (' font-weight="bold"' if size > 11 else "")
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle" {style}>{escape(text)}</text>'


FORMATS: Mapping[str, Callable[..., str]] = MappingProxyType({"text": to_text, "mermaid": to_mermaid, "svg": to_svg})

__all__ = ["FORMATS", "to_mermaid", "to_svg", "to_text"]

"""Render a graph as SVG, with boxes colored by role and edges labeled with keys. Needs no dependency."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from realign.draw.flows import DATASET, GREY, NO_NOTES, Flow, Kind, colours, detail, flows
from realign.draw.layout import Item, link, place, ranks

if TYPE_CHECKING:
    from realign.api import DataflowGraph

FONT = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
ADVANCE = 0.61  # width of a monospace character in units of the font size
NAME_SIZE, DETAIL_SIZE, KEY_SIZE = 14, 11, 11
LINE_HEIGHT = 14
BOX_HEIGHT = 46.0
GAP_Y = 30.0
MARGIN = 24.0
INK, MUTED = "#0f172a", "#64748b"


class _Edge(NamedTuple):
    flow: Flow
    items: tuple[Item, ...]  # two items of neighboring rows
    arrow: bool


def to_svg(graph: DataflowGraph, notes: Mapping[str, str] = NO_NOTES) -> str:
    """Return an SVG image: calls from top to bottom in execution order, edges labeled with their keys.

    Args:
        graph: The graph to render.
        notes: Additional text by role, shown in the boxes of its calls.
    """
    every = flows(graph)
    details = {rpc.name: detail(rpc, notes) for rpc in graph.rpcs} | {DATASET: "rows of prompts"}
    boxes, labels, edges = _items(graph, every, details)
    passing = {id(item): item for edge in edges for item in edge.items}
    everything = {id(item): item for item in (*boxes.values(), *(item for _, item in labels))} | passing
    width, height = place(list(everything.values()), GAP_Y)
    style = colours(graph.order)
    role_of = {rpc.name: rpc.model for rpc in graph.rpcs}
    stroke = {name: style[role][1] for name, role in role_of.items()} | {DATASET: GREY[1]}
    body = [_line(edge, stroke[edge.flow.source]) for edge in edges]
    fill = {role: colour for role, (colour, _) in style.items()}
    body += [
        _label(flow, item, style[flow.role][1] if flow.role else stroke[flow.source], fill.get(flow.role, "#ffffff"))
        for flow, item in labels
        if flow.keys
    ]
    for rpc in graph.order:
        tip = f"{rpc.name}: reads {', '.join(rpc.inputs) or 'nothing'}; writes {', '.join(rpc.outputs) or 'nothing'}"
        body.append(_box(boxes[rpc.name], details[rpc.name], style[rpc.model], tip))
    if DATASET in boxes:
        body.append(_box(boxes[DATASET], details[DATASET], GREY, f"dataset: {', '.join(graph.dataset_keys)}"))
    total_width, total_height = width + 2 * MARGIN, height + 2 * MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total_width:.0f}" height="{total_height:.0f}" '
        f'viewBox="0 0 {total_width:.0f} {total_height:.0f}" font-family="{FONT}" role="img">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n<g transform="translate({MARGIN:g} {MARGIN:g})">'
    )
    return "\n".join([head, *body, "</g>", "</svg>", ""])


def _items(
    graph: DataflowGraph, every: Sequence[Flow], details: Mapping[str, str]
) -> tuple[dict[str, Item], list[tuple[Flow, Item]], list[_Edge]]:
    """Return boxes by name, a label item for each flow, and the lines between neighboring rows."""
    from_dataset = {target for flow in every if flow.source == DATASET for target in flow.targets}
    before = {
        rpc.name: [*graph.edges[rpc.name], *([DATASET] if rpc.name in from_dataset else [])] for rpc in graph.order
    }
    if from_dataset:
        before[DATASET] = []
    rank = ranks(before)
    boxes = {name: Item(name, _box_width(name, details[name]), BOX_HEIGHT, 2 * r) for name, r in rank.items()}
    labels: list[tuple[Flow, Item]] = []
    edges: list[_Edge] = []
    for flow in every:
        label = _label_item(flow, boxes[flow.source].row + 1)
        labels.append((flow, label))
        edges.append(_edge(flow, boxes[flow.source], label, arrow=flow.kind is Kind.sync))
        trunk = {label.row: label}
        for target in sorted(flow.targets, key=lambda name: boxes[name].row):
            for row in range(max(trunk) + 1, boxes[target].row):
                trunk[row] = Item("", 4, 0, row)
                edges.append(_edge(flow, trunk[row - 1], trunk[row], arrow=False))
            edges.append(_edge(flow, trunk[boxes[target].row - 1], boxes[target], arrow=True))
    return boxes, labels, edges


def _edge(flow: Flow, upper: Item, lower: Item, *, arrow: bool) -> _Edge:
    link(upper, lower)
    return _Edge(flow, (upper, lower), arrow)


def _lines(flow: Flow) -> list[str]:
    note = [f"({flow.kind.value})"] if flow.kind in (Kind.kept, Kind.unread) else []
    return [*([f"weights of {flow.role}"] if flow.kind is Kind.sync else []), *flow.keys, *note]


def _label_item(flow: Flow, row: int) -> Item:
    lines = _lines(flow)
    if not lines:
        return Item("", 4, 0, row)
    width = max(map(len, lines)) * KEY_SIZE * ADVANCE + 14
    return Item(" ".join(lines), width, len(lines) * LINE_HEIGHT + 8, row)


def _box_width(name: str, detail: str) -> float:
    return max(len(name) * NAME_SIZE, len(detail) * DETAIL_SIZE) * ADVANCE + 32


def _port(item: Item, neighbour: Item, neighbours: Iterable[Item]) -> float:
    """Return the x at which a line enters or leaves an item. Lines are side by side, ordered by their other ends."""
    around = sorted(neighbours, key=lambda other: other.x)
    if item.is_line or len(around) < 2:
        return item.x
    step = min(22.0, (item.width - 24) / (len(around) - 1))
    return item.x + (around.index(neighbour) - (len(around) - 1) / 2) * step


def _line(edge: _Edge, colour: str) -> str:
    upper, lower = edge.items
    x1, y1 = _port(upper, lower, upper.below), upper.row_bottom
    x2, y2 = _port(lower, upper, lower.above), lower.row_top
    start = upper.y + (-upper.height if upper.is_line else upper.height) / 2
    end = lower.y - lower.height / 2 - (7.0 if edge.arrow else 0.0)
    bend = (y1 + min(y2, end)) / 2
    # The line bends only between rows. Within a row, whose other items may be taller, it is vertical.
    path = (
        f"M{x1:.1f} {start:.1f}V{y1:.1f}C{x1:.1f} {bend:.1f} {x2:.1f} {bend:.1f} {x2:.1f} {min(y2, end):.1f}V{end:.1f}"
    )
    dash = ' stroke-dasharray="4 4"' if edge.flow.kind not in (Kind.data, Kind.sync) else ""
    width = 4 if edge.flow.kind is Kind.sync else 1.4
    shape = f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>'
    if edge.arrow:
        shape += f'<path d="M{x2:.1f} {end + 7:.1f}l-4 -8h8z" fill="{colour}"/>'
    return shape


def _label(flow: Flow, item: Item, colour: str, fill: str) -> str:
    left, top = item.x - item.width / 2, item.y - item.height / 2
    dash = "" if flow.targets or flow.kind is Kind.sync else ' stroke-dasharray="3 3"'
    frame = (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{item.width:.1f}" height="{item.height:.1f}" rx="5" '
        f'fill="{fill}" stroke="{colour}" stroke-opacity="0.55"{dash}/>'
    )
    rows = []
    for i, line in enumerate(_lines(flow)):
        colour_of_line = MUTED if line == f"({flow.kind.value})" else INK
        y = top + 4 + LINE_HEIGHT * (i + 0.75)
        rows.append(_text(item.x, y, line, KEY_SIZE, colour_of_line))
    return frame + "".join(rows)


def _box(item: Item, detail: str, colour: tuple[str, str], tip: str) -> str:
    left, top = item.x - item.width / 2, item.y - item.height / 2
    fill, stroke = colour
    return (
        f"<g><title>{escape(tip)}</title>"
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{item.width:.1f}" height="{item.height:.1f}" rx="8" '
        f'fill="{fill}" stroke="{stroke}" stroke-width="1.6"/>'
        + _text(item.x, item.y - 3, item.name, NAME_SIZE, INK, bold=True)
        + _text(item.x, item.y + 14, detail, DETAIL_SIZE, MUTED)
        + "</g>"
    )


def _text(x: float, y: float, text: str, size: int, colour: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="middle"{weight}>'
        f"{escape(text)}</text>"
    )

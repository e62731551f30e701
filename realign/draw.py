"""Render a `DataflowGraph` as text, Mermaid or SVG. All renderers are pure functions that return a string.

The SVG has a layered layout without overlaps (Sugiyama, Tagawa and Toda 1981, doi:10.1109/TSMC.1981.4308636). Rows of
calls (by longest path from the start) alternate with rows of labels. A line that passes through a row occupies a narrow
slot in it. So lines bend only in the gaps between neighboring rows, and never cross a box or a label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from html import escape
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from realign.api import RPC, DataflowGraph


DATASET = "dataset"
COLORS = (
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
    reported = "kept for reports"
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
    bundles = [
        Flow(source, keys, tuple(names), Kind.data if keys else Kind.order) for (source, keys), names in targets.items()
    ]
    unread = set(graph.unread())
    read = {key for rpc in graph.rpcs for key in rpc.inputs}
    for rpc in graph.order:
        for kind, keys in (
            (Kind.reported, tuple(k for k in rpc.outputs if k in graph.results and k not in read)),
            (Kind.unread, tuple(k for k in rpc.outputs if k in unread)),
        ):
            if keys:
                bundles.append(Flow(rpc.name, keys, (), kind))
    for role, sync in graph.sync.items():
        # The weights are final after the last call that trains them.
        source = [rpc.name for rpc in graph.order if rpc.model == sync.of and rpc.method == "train_step"][-1]
        bundles.append(Flow(source, tuple(sync.describe().split(", ")), (), Kind.sync, role))
    place = {name: i for i, name in enumerate((DATASET, *(rpc.name for rpc in graph.order)))}
    return sorted(bundles, key=lambda flow: place[flow.source])


def detail(rpc: RPC, notes: Mapping[str, str]) -> str:
    """Return the second line in the box of a call: its role, its method, and the note on the role."""
    return " · ".join([rpc.model, rpc.method, *([notes[rpc.model]] if rpc.model in notes else [])])


def colors(rpcs: Sequence[RPC]) -> dict[str, tuple[str, str]]:
    """Return the fill and stroke colors of each role."""
    roles = dict.fromkeys(rpc.model for rpc in rpcs)
    return {role: COLORS[i % len(COLORS)] for i, role in enumerate(roles)}


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
            Kind.reported: f"{keys}  (kept for reports)",
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
    style = colors(graph.order)
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
    # `#quot;` is Mermaid's own entity: a quote would end the label.
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "#quot;")


GAP_X = 26.0
SWEEPS = 24


@dataclass(eq=False)
class Item:
    """An item of a row: a call, a label, or a line that passes through."""

    name: str
    width: float
    height: float
    row: int
    x: float = 0.0
    y: float = 0.0
    row_top: float = 0.0
    row_bottom: float = 0.0
    above: list[Item] = field(default_factory=list)
    below: list[Item] = field(default_factory=list)

    @property
    def is_line(self) -> bool:
        """Whether this item is a slot for a line that passes through."""
        return not self.name


def link(upper: Item, lower: Item) -> None:
    """Connect two items of neighboring rows."""
    upper.below.append(lower)
    lower.above.append(upper)


def ranks(before: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return the length of the longest path to each name, given the predecessors of each name."""
    ranks_of: dict[str, int] = {}

    def rank(name: str) -> int:
        if name not in ranks_of:
            ranks_of[name] = 1 + max((rank(other) for other in before[name]), default=-1)
        return ranks_of[name]

    for name in before:
        rank(name)
    return ranks_of


def place(items: Sequence[Item], gap_y: float) -> tuple[float, float]:
    """Set the center (`x`, `y`) and the row bounds of every item. Return width and height of the layout."""
    if not items:
        return 0.0, 0.0
    rows: list[list[Item]] = [[] for _ in range(1 + max(item.row for item in items))]
    for item in items:
        rows[item.row].append(item)
    rows = _untangle(rows)
    for row in rows:
        _spread(row, [0.0] * len(row))
    for sweep in range(SWEEPS):
        for row in rows if sweep % 2 == 0 else rows[::-1]:
            _spread(row, [_wish(item) for item in row])
    left = min(item.x - item.width / 2 for item in items)
    y = 0.0
    for row in rows:
        height = max((item.height for item in row), default=0.0)
        for item in row:
            item.x -= left
            item.y = y + height / 2
            item.row_top, item.row_bottom = y, y + height
            item.height = height if item.is_line else item.height
        y += height + gap_y
    return max(item.x + item.width / 2 for item in items), y - gap_y


def _untangle(rows: list[list[Item]]) -> list[list[Item]]:
    """Sort each row by the mean position of its neighbors, in sweeps. Return the order with the fewest crossings."""
    best, fewest = rows, _crossings(rows)
    at: dict[int, int] = {}

    def above(item: Item) -> float:
        return _mean([at[id(other)] for other in item.above])

    def below(item: Item) -> float:
        return _mean([at[id(other)] for other in item.below])

    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        rows = [list(row) for row in rows]
        for i in range(len(rows)) if down else reversed(range(len(rows))):
            fixed = i - 1 if down else i + 1
            if 0 <= fixed < len(rows):
                at.update((id(item), n) for n, item in enumerate(rows[fixed]))
                rows[i].sort(key=above if down else below)
        if (count := _crossings(rows)) < fewest:
            best, fewest = rows, count
    return best


def _mean(places: list[int]) -> float:
    return sum(places) / len(places) if places else 0.0


def _crossings(rows: list[list[Item]]) -> int:
    total = 0
    for upper, lower in pairwise(rows):
        at = {id(item): n for n, item in enumerate(lower)}
        ends = [sorted(at[id(o)] for o in item.below) for item in upper]
        flat = [(n, end) for n, own in enumerate(ends) for end in own]
        total += sum(a < c and b > d for a, b in flat for c, d in flat)
    return total


def _wish(item: Item) -> float:
    """Return the preferred x of an item: the mean x of its neighbors, weighted to straighten lines."""
    around = [(8.0 if item.is_line and o.is_line else 1.0, o.x) for o in (*item.above, *item.below)]
    weight = sum(w for w, _ in around)
    return sum(w * x for w, x in around) / weight if weight else item.x


def _spread(row: list[Item], wishes: list[float]) -> None:
    """Place a row as close to the preferred x (`wishes`) as order and widths allow.

    Minimizes the squared distances by pooling adjacent violators.
    """
    offsets: list[float] = []
    for i, item in enumerate(row):
        step = (row[i - 1].width + item.width) / 2 + GAP_X if i else 0.0
        offsets.append((offsets[-1] if offsets else 0.0) + step)
    blocks: list[tuple[float, int]] = []  # mean, size
    for wish, offset in zip(wishes, offsets, strict=True):
        mean, size = wish - offset, 1
        while blocks and blocks[-1][0] > mean:
            other, n = blocks.pop()
            mean, size = (mean * size + other * n) / (size + n), size + n
        blocks.append((mean, size))
    starts = [mean for mean, size in blocks for _ in range(size)]
    for item, start, offset in zip(row, starts, offsets, strict=True):
        item.x = start + offset


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
    style = colors(graph.order)
    role_of = {rpc.name: rpc.model for rpc in graph.rpcs}
    stroke = {name: style[role][1] for name, role in role_of.items()} | {DATASET: GREY[1]}
    # Lines first: an SVG paints in order, so boxes and labels cover them.
    body = [_line(edge, stroke[edge.flow.source]) for edge in edges]
    fill = {role: color for role, (color, _) in style.items()}
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
    # Calls in even rows, so that the row below each has room for its labels.
    boxes = {name: Item(name, _box_width(name, details[name]), BOX_HEIGHT, 2 * r) for name, r in rank.items()}
    labels: list[tuple[Flow, Item]] = []
    edges: list[_Edge] = []
    for flow in every:
        label = _label_item(flow, boxes[flow.source].row + 1)
        labels.append((flow, label))
        edges.append(_edge(flow, boxes[flow.source], label, arrow=flow.kind is Kind.sync))
        trunk = {label.row: label}
        # From near to far: a line to a farther call continues the trunk of the nearer ones.
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
    note = [f"({flow.kind.value})"] if flow.kind in (Kind.reported, Kind.unread) else []
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


def _line(edge: _Edge, color: str) -> str:
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
    shape = f'<path d="{path}" fill="none" stroke="{color}" stroke-width="{width}"{dash}/>'
    if edge.arrow:
        shape += f'<path d="M{x2:.1f} {end + 7:.1f}l-4 -8h8z" fill="{color}"/>'
    return shape


def _label(flow: Flow, item: Item, color: str, fill: str) -> str:
    left, top = item.x - item.width / 2, item.y - item.height / 2
    dash = "" if flow.targets or flow.kind is Kind.sync else ' stroke-dasharray="3 3"'
    frame = (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{item.width:.1f}" height="{item.height:.1f}" rx="5" '
        f'fill="{fill}" stroke="{color}" stroke-opacity="0.55"{dash}/>'
    )
    rows = []
    for i, line in enumerate(_lines(flow)):
        color_of_line = MUTED if line == f"({flow.kind.value})" else INK
        y = top + 4 + LINE_HEIGHT * (i + 0.75)
        rows.append(_text(item.x, y, line, KEY_SIZE, color_of_line))
    return frame + "".join(rows)


def _box(item: Item, detail: str, color: tuple[str, str], tip: str) -> str:
    left, top = item.x - item.width / 2, item.y - item.height / 2
    fill, stroke = color
    return (
        f"<g><title>{escape(tip)}</title>"
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{item.width:.1f}" height="{item.height:.1f}" rx="8" '
        f'fill="{fill}" stroke="{stroke}" stroke-width="1.6"/>'
        + _text(item.x, item.y - 3, item.name, NAME_SIZE, INK, bold=True)
        + _text(item.x, item.y + 14, detail, DETAIL_SIZE, MUTED)
        + "</g>"
    )


def _text(x: float, y: float, text: str, size: int, color: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" text-anchor="middle"{weight}>'
        f"{escape(text)}</text>"
    )


FORMATS: Mapping[str, Callable[[DataflowGraph, Mapping[str, str]], str]] = MappingProxyType(
    {"text": to_text, "mermaid": to_mermaid, "svg": to_svg}
)

__all__ = ["FORMATS", "to_mermaid", "to_svg", "to_text"]

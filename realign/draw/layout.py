"""Layered graph layout without overlaps (Sugiyama, Tagawa and Toda 1981, doi:10.1109/TSMC.1981.4308636).

Rows of calls (by longest path from the start) alternate with rows of labels. A line that passes through a row occupies
a narrow slot in it. So lines bend only in the gaps between neighboring rows, and never cross a box or a label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

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
    found: dict[str, int] = {}

    def rank(name: str) -> int:
        if name not in found:
            found[name] = 1 + max((rank(other) for other in before[name]), default=-1)
        return found[name]

    for name in before:
        rank(name)
    return found


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

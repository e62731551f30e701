"""Draw `packed-layout.svg` from the sample that the first block of `docs/concepts/packed-layout.md` builds.

python docs/images/packed_layout.py
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from realign.api import SequenceSample

HERE = Path(__file__).parent
PAGE = HERE.parent / "concepts" / "packed-layout.md"
PICTURE = HERE / "packed-layout.svg"

CELL, ROW, GAP = 40, 25, 6
LEFT, RIGHT, TOP = 162, 16, 12
FONT = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
INK, MUTED, LINE = "#0f172a", "#64748b", "#cbd5e1"
GIVEN, SAMPLED, TOOL, PLAIN = "#e2e8f0", "#bfdbfe", "#fed7aa", "#ffffff"
WORDS = {10: "+", 11: "=", 12: "end", 13: "calc"}
UNREAD = "·"
MASKS = ("prompt_mask", "loss_mask")
CREDIT = ("logprobs", "values", "returns", "advantages")
Span = tuple[int, int]


def read_sample() -> SequenceSample:
    """Run the page's first python block and return its `sample`."""
    block = re.search(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert block is not None
    names: dict[str, Any] = {}
    exec(compile(block[1], str(PAGE), "exec"), names)
    return names["sample"]


def draw(sample: SequenceSample) -> str:
    """Return the figure as SVG text."""
    picture = Picture()
    bounds = sample.cu_seqlens().tolist()
    slots = [(t, t + 1) for t in range(bounds[-1])]
    sequences = list(pairwise(bounds))
    owners = [bounds[s] for s in sample.lengths["input_ids"].sequence_starts.tolist()]
    prompts = list(pairwise(owners))

    picture.row("ids", "", prompts, [f'prompt "{i}"' for i in sample.ids])
    picture.row("", "", sequences, [f"sequence {s}" for s in range(len(sequences))])
    top = picture.y
    picture.indices(len(slots))
    token_rows(picture, sample, slots)
    picture.y += GAP
    for key in ("rewards", "truncated"):
        picture.row(key, "[S]", sequences, [show(x) for x in sample[key].tolist()])
    picture.row("group_index()", "[S]", sequences, [str(g) for g in sample.group_index().tolist()])
    picture.boundaries(bounds, top)
    picture.row("metadata row", "", prompts, [str(row) for row in sample.metadata["row"]])
    picture.y += GAP
    own_lengths(picture, sample)
    picture.legend()
    return picture.svg(LEFT + bounds[-1] * CELL + RIGHT)


def token_rows(picture: Picture, sample: SequenceSample, slots: Sequence[Span]) -> None:
    """Draw the keys with one element per token."""
    given_T, trained_T = sample["prompt_mask"].tolist(), sample["loss_mask"].tolist()
    color_T = [GIVEN if g else SAMPLED if t else TOOL for g, t in zip(given_T, trained_T, strict=True)]
    ids_T = sample["input_ids"].tolist()
    picture.row("text", "", slots, [WORDS.get(i, str(i)) for i in ids_T], color_T)
    picture.y += GAP
    picture.row("input_ids", "[T]", slots, [str(i) for i in ids_T])
    for key, color in zip(MASKS, (GIVEN, SAMPLED), strict=True):
        mask_T = sample[key].tolist()
        picture.row(key, "[T]", slots, [show(m) for m in mask_T], [color if m else PLAIN for m in mask_T])
    for key in CREDIT:
        pairs = zip(sample[key].tolist(), trained_T, strict=True)
        picture.row(key, "[T]", slots, [show(x) if trained else UNREAD for x, trained in pairs])
    picture.row("versions", "[T]", slots, [str(v) for v in sample["versions"].tolist()])


def own_lengths(picture: Picture, sample: SequenceSample) -> None:
    """Draw a key with other lengths."""
    key = "prompt_ids"
    _, first, total = sample.cu_seqlens(key).tolist()
    shifted = [t + (t >= first) for t in range(total)]  # one empty cell between the two prompts
    spans = [(t, t + 1) for t in shifted]
    picture.row(key, "", spans, [str(i) for i in sample[key].tolist()], [GIVEN] * total)
    lengths = [list(n) for n in sample.lengths[key].as_tuples()]
    picture.text(LEFT + (total + 2) * CELL, picture.y - 8, f"a key with its own lengths: {lengths}", "start", MUTED)


class Picture:
    """Rows of cells from top to bottom; `y` is where the next one starts."""

    def __init__(self) -> None:
        self.body: list[str] = []
        self.y = TOP

    def row(
        self, label: str, shape: str, spans: Sequence[Span], texts: Sequence[str], colors: Sequence[str] | None = None
    ) -> None:
        """One cell for each span of token columns."""
        self.text(LEFT - 44, self.y + 17, label, "end")
        self.text(LEFT - 10, self.y + 17, shape, "end", MUTED, 11)
        for (start, stop), text, color in zip(spans, texts, colors or [PLAIN] * len(spans), strict=True):
            x, width = LEFT + start * CELL, (stop - start) * CELL
            self.box(x, self.y, width, ROW, color)
            self.text(x + width / 2, self.y + 17, text, color=MUTED if text == UNREAD else INK)
        self.y += ROW

    def indices(self, n: int) -> None:
        """Draw the indices of the token columns."""
        self.text(LEFT - 44, self.y + 19, "index t", "end", MUTED)
        for t in range(n):
            self.text(LEFT + (t + 0.5) * CELL, self.y + 19, str(t), color=MUTED, size=11)
        self.y += ROW

    def boundaries(self, bounds: Sequence[int], top: int) -> None:
        """Dashed lines from `top` down to here, and their numbers."""
        for b in bounds:
            x = LEFT + b * CELL
            self.body.append(
                f'<path d="M{x} {top} V{self.y + 6}" stroke="{INK}" stroke-width="1.6" stroke-dasharray="4 3"/>'
            )
            self.text(x, self.y + 21, str(b), weight="bold")
        self.text(LEFT - 20, self.y + 21, "cu_seqlens", "end", weight="bold")
        self.y += 36

    def legend(self) -> None:
        """Draw the legend."""
        self.y += 3 * GAP
        x = LEFT
        for color, meaning in ((GIVEN, "given"), (SAMPLED, "sampled, trains"), (TOOL, "written by a tool")):
            self.box(x, self.y, 16, 14, color)
            self.text(x + 24, self.y + 12, meaning, "start", MUTED, 12)
            x += 52 + 8 * len(meaning)
        self.text(x, self.y + 12, f"{UNREAD} never read: any value is fine", "start", MUTED, 12)
        self.y += ROW

    def box(self, x: float, y: float, width: float, height: float, color: str) -> None:
        """Draw a filled rectangle."""
        size = f'width="{width:g}" height="{height:g}"'
        self.body.append(f'<rect x="{x:g}" y="{y:g}" {size} fill="{color}" stroke="{LINE}"/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        anchor: str = "middle",
        color: str = INK,
        size: int = 13,
        weight: str = "normal",
    ) -> None:
        """One line of text."""
        style = f'text-anchor="{anchor}" fill="{color}" font-size="{size}" font-weight="{weight}"'
        if text:
            self.body.append(f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>')

    def svg(self, width: int) -> str:
        """Return the whole file."""
        size = f'width="{width}" height="{self.y + TOP}" viewBox="0 0 {width} {self.y + TOP}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" role="img">'
        return "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *self.body, "</svg>", ""])


def show(value: float) -> str:
    """Format a number for a cell."""
    if isinstance(value, bool):
        return "T" if value else "F"
    return f"{value:.1f}"


if __name__ == "__main__":
    PICTURE.write_text(draw(read_sample()), encoding="utf-8")

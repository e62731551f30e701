"""Curves of text: one block character per column."""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values over time as at most `width` characters, from the lowest block (minimum) to the highest (maximum).

    Neighboring values share a character if there are more values than characters; it shows their mean. Values that are
    not finite are ignored; a character without a finite value is a space. Equal values are drawn in the middle.
    """
    columns = min(width, len(values))
    parts = [values[i * len(values) // columns : (i + 1) * len(values) // columns] for i in range(columns)]
    means = [sum(finite) / len(finite) if (finite := [v for v in p if math.isfinite(v)]) else None for p in parts]
    known = [mean for mean in means if mean is not None]
    low, span = (min(known), max(known) - min(known)) if known else (0.0, 0.0)
    top = len(BLOCKS) - 1

    def block(mean: float) -> str:
        return BLOCKS[round((mean - low) / span * top) if 0 < span < math.inf else top // 2]

    return "".join(" " if mean is None else block(mean) for mean in means)


__all__ = ["sparkline"]

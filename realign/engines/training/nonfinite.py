"""Where a loss or gradient that is not finite comes from. Asked after a step that failed: a good one pays nothing."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeAlias

from torch import Tensor

from realign.api.sample import SequenceSample
from realign.engines.network.shared_prefix import Layout

IsFinite: TypeAlias = Callable[[SequenceSample, Layout | None], bool]

NAMED = 8
"""Ids that a message names at most; the search ends with them."""


def origin(
    micro_batches: Sequence[tuple[SequenceSample, Layout]], losses: Sequence[Tensor], is_finite: IsFinite
) -> str:
    """Name the prompts whose loss or gradient is not finite.

    Args:
        micro_batches: of the step, with their layouts.
        losses: of each, 0-d.
        is_finite: computes loss and gradient of a sample once more, and whether both are finite; without a layout, of
            one that is cut anew.

    Returns:
        The ids, or what else is known: that every micro-batch is finite alone.
    """
    found = [part for (part, _), loss in zip(micro_batches, losses, strict=True) if not bool(loss.isfinite())]
    what = "loss"
    if not found:
        found, what = [part for part, layout in micro_batches if not is_finite(part, layout)], "gradient"
    if not found:
        return "no micro-batch alone: each has a finite loss and gradient, and their sum has not"
    ids: dict[Hashable, None] = {}  # in the order found; a group that was cut has its id in two micro-batches
    for i in _culprits(found, is_finite):
        if len(ids) == NAMED and i not in ids:
            return f"the {what} of ids {', '.join(map(repr, ids))} and others"
        ids[i] = None
    return f"the {what} of id{'s' if len(ids) > 1 else ''} {', '.join(map(repr, ids))}"


def _culprits(parts: Sequence[SequenceSample], is_finite: IsFinite) -> Iterator[Hashable]:
    """The ids of each micro-batch that are to blame alone; all of them, if none is."""
    for part in parts:
        alone = (i for k, i in enumerate(part.ids) if not is_finite(part.take([k]), None))
        first = next(alone, None) if len(part) > 1 else None
        if first is None:
            yield from part.ids
        else:
            yield first
            yield from alone

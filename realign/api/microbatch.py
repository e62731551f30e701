"""Cutting a batch into micro-batches by token budget: a pure plan over lengths."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from realign.api.lengths import IntArray, Lengths


@dataclass
class MicroBatchSpec:
    """How large a micro-batch may be. Invisible in loss, gradient and metrics; it trades memory for speed.

    Attributes:
        max_tokens_per_microbatch: packed tokens that one forward pass may hold; None means no limit.
        n_microbatches: cut into at least this many, as far as there are groups to part.
    """

    max_tokens_per_microbatch: int | None = None
    n_microbatches: int = 1

    def __post_init__(self) -> None:
        if self.max_tokens_per_microbatch is not None and self.max_tokens_per_microbatch < 1:
            raise ValueError(f"max_tokens_per_microbatch must be at least 1, found {self.max_tokens_per_microbatch}")
        if self.n_microbatches < 1:
            raise ValueError(f"n_microbatches must be at least 1, found {self.n_microbatches}")


def plan_microbatches(lengths: Lengths, spec: MicroBatchSpec) -> list[IntArray]:
    """Assign every sequence to a micro-batch: never over the budget, balanced, as few as the heuristic finds.

    A group (all sequences of one prompt) stays whole unless it alone exceeds the budget; then it is cut between
    sequences. Longest-processing-time scheduling, which keeps the largest load within 4/3 of the best possible
    (Graham 1969, doi:10.1137/0117039).

    Args:
        lengths: tokens of each sequence of each prompt.
        spec: the budget.

    Returns:
        For each micro-batch, the ascending indices of its sequences; every index stands in exactly one.

    Raises:
        ValueError: one sequence alone exceeds the budget.
    """
    limit = spec.max_tokens_per_microbatch
    units = _units(lengths, limit)
    if not units:
        return []
    loads = np.array([int(lengths.flat[unit].sum()) for unit in units])
    order = np.argsort(-loads, kind="stable")
    n_bins = min(spec.n_microbatches, len(units))
    if limit is not None:
        n_bins = max(n_bins, -(-int(loads.sum()) // limit))
    bins = _fill(loads, order, n_bins, limit)
    if limit is not None and len(bins) > n_bins:
        # Bins that were opened late are emptier: spread again over the final number, and keep that if it fits.
        even = _fill(loads, order, len(bins), None)
        if max(int(loads[b].sum()) for b in even) <= limit:
            bins = even
    plan = [np.sort(np.concatenate([units[i] for i in b])) for b in bins if b]
    return sorted(plan, key=lambda sequences: int(sequences[0]))


def _units(lengths: Lengths, limit: int | None) -> list[IntArray]:
    """The pieces that may not be cut: whole groups, or single sequences of the groups that exceed the budget."""
    if limit is not None and len(lengths.flat) and int(lengths.flat.max()) > limit:
        s = int(lengths.flat.argmax())
        raise ValueError(
            f"sequence {s} (of prompt {int(lengths.prompt_of_sequence[s])} of the batch) has {int(lengths.flat[s])} "
            f"tokens, more than max_tokens_per_microbatch={limit}; raise the budget or shorten the data"
        )
    units: list[IntArray] = []
    bounds = lengths.sequence_starts
    for prompt, tokens in enumerate(lengths.per_prompt):
        group = np.arange(bounds[prompt], bounds[prompt + 1])
        if limit is not None and tokens > limit:
            units.extend(group[i : i + 1] for i in range(len(group)))
        elif len(group):
            units.append(group)
    return units


def _fill(loads: IntArray, order: IntArray, n_bins: int, limit: int | None) -> list[list[int]]:
    """Give each unit, largest first, to the emptiest bin; open another bin where it would not fit."""
    bins: list[list[int]] = [[] for _ in range(n_bins)]
    heap = [(0, b) for b in range(n_bins)]
    for unit in order.tolist():
        size = int(loads[unit])
        load, b = heap[0]
        if limit is not None and load + size > limit:
            bins.append([unit])
            heapq.heappush(heap, (size, len(bins) - 1))
        else:
            heapq.heapreplace(heap, (load + size, b))
            bins[b].append(unit)
    return bins

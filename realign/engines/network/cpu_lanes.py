"""How the cores of a CPU share the work: passes side by side, and one core for what is too small to share.

Threads that compute one operator together have to meet at its end. That takes microseconds where they wait awake, and
up to a fifth of a millisecond where they sleep (`OMP_WAIT_POLICY=PASSIVE`, virtual machines): longer than most
operators of a model that trains on a CPU. Micro-batches have nothing to tell one another until their gradients are
added.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from enum import StrEnum
from typing import TypeVar

import torch
from torch import nn

from realign.api.lengths import Lengths
from realign.api.microbatch import MicroBatchSpec

Item = TypeVar("Item")
Result = TypeVar("Result")

MIN_ROWS = 128
"""Rows of a pass below which it is not parted: two passes over half of them would take as long."""


class ParallelPasses(StrEnum):
    """Whether the micro-batches of a batch are computed side by side on a CPU."""

    auto = "auto"
    off = "off"


def in_lanes(lengths: Lengths, rows: int, spec: MicroBatchSpec, threads: int) -> tuple[int, MicroBatchSpec]:
    """How many passes to run at a time, and micro-batches that divide the budget and the rows among them.

    Args:
        lengths: of the batch.
        rows: of all its passes together.
        spec: the budget of all passes that run at a time.
        threads: of this process, at most one lane each.

    Returns:
        The number of lanes; 1 and `spec` itself where there is too little to part, or where the budget has no room for
        two of the longest sequences (with `whole_groups`: groups).
    """
    limit = spec.max_tokens_per_microbatch
    longest = int((lengths.per_prompt if spec.whole_groups else lengths.flat).max(initial=1))
    lanes = min(threads, rows // MIN_ROWS, threads if limit is None else limit // max(1, longest))
    if lanes < 2:
        return 1, spec
    share = None if limit is None else limit // lanes
    rounds = 1 if limit is None else -(-rows // limit)
    return lanes, replace(
        spec, max_tokens_per_microbatch=share, n_microbatches=max(spec.n_microbatches, lanes * rounds)
    )


def rewrites_rope(module: nn.Module) -> bool:
    """Whether every pass rewrites the frequencies of the rotary positions, for its longest text: two would collide."""
    found = (getattr(part, "rope_type", None) for part in module.modules())
    kinds = {kind for x in found for kind in (x.values() if isinstance(x, Mapping) else [x])}
    return any(kind is not None and ("dynamic" in kind or kind == "longrope") for kind in kinds)


def side_by_side(work: Callable[[Item], Result], items: Iterable[Item], lanes: int) -> Iterator[Result]:
    """What `work` makes of each item, in their order; `lanes` of them are worked on at a time, in threads.

    Each thread has its part of the cores. No more than `lanes` + 1 results exist that were not taken. What torch keeps
    for each thread (grad mode, autocast) is at its default in `work`. An exception ends the rest.
    """
    if lanes == 1:
        yield from map(work, items)
        return
    threads = torch.get_num_threads()

    def alone(item: Item) -> Result:
        torch.set_num_threads(max(1, threads // lanes))
        return work(item)

    waiting: deque[Future[Result]] = deque()
    try:
        with ThreadPoolExecutor(lanes, thread_name_prefix="pass") as pool:
            try:
                for item in items:
                    waiting.append(pool.submit(alone, item))
                    if len(waiting) > lanes:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()
    finally:
        torch.set_num_threads(threads)  # MKL has one number for all threads, which the lanes have lowered

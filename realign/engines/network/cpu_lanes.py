"""Concurrent passes on a CPU: each lane (thread) runs a micro-batch with a part of the cores.

Threads that compute one operator together must synchronize at its end. That takes microseconds if they spin, and up
to 0.2 ms if they sleep (`OMP_WAIT_POLICY=PASSIVE`, virtual machines). The latter is longer than most operators of a
model that trains on a CPU. Micro-batches need no synchronization until their gradients are added.
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
"""Minimum number of rows per lane. Splitting a smaller pass into two saves no time."""


class ParallelPasses(StrEnum):
    """Whether the micro-batches of a batch are computed concurrently on a CPU."""

    auto = "auto"
    off = "off"


def in_lanes(lengths: Lengths, rows: int, spec: MicroBatchSpec, threads: int) -> tuple[int, MicroBatchSpec]:
    """Choose the number of concurrent passes (lanes), and divide the budget and the rows among them.

    Args:
        lengths: sequence lengths of the batch.
        rows: number of rows of all its passes together.
        spec: the budget for all concurrent passes together.
        threads: maximum number of lanes.

    Returns:
        The number of lanes and the spec of one lane. They are 1 and `spec` if the batch is too small to split, or if
        the budget does not fit two of the longest sequences (with `whole_groups`: groups).
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
    """Return whether each pass modifies the rotary frequencies for its longest sequence.

    Such passes cannot run concurrently.
    """
    found = (getattr(part, "rope_type", None) for part in module.modules())
    kinds = {kind for x in found for kind in (x.values() if isinstance(x, Mapping) else [x])}
    return any(kind is not None and ("dynamic" in kind or kind == "longrope") for kind in kinds)


def side_by_side(work: Callable[[Item], Result], items: Iterable[Item], lanes: int) -> Iterator[Result]:
    """Yield `work(item)` for each item, in order; `lanes` threads run concurrently.

    The lanes divide the threads of torch among them. At most `lanes` + 1 results are pending. Inside `work`,
    thread-local state of torch (grad mode, autocast) has its default. An exception cancels the remaining items.
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
        torch.set_num_threads(threads)  # the lanes lowered MKL's process-wide thread count

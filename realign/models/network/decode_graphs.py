"""`DecodeGraphs`: decode steps on CUDA as graphs, so that one launch starts all layers.

A graph repeats its kernels on the same memory, with the same number of rows and the same largest length. Rows are
therefore rounded up to a power of two, and lengths to a multiple of `PAGE`. ADR 46 has measurements.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import TypeAlias
from weakref import ref

import torch
from torch import Tensor

from realign.models.network.kernels import PAGE
from realign.models.network.kv_cache import DecodeContext, KVCache, PagedDecodeContext, PagedKVCache

logger = logging.getLogger(__name__)

Step: TypeAlias = Callable[[Tensor, Tensor, DecodeContext | PagedDecodeContext], Tensor]
"""The call of a `decoder.Trunk` for one new token in each row."""

Work: TypeAlias = Callable[[], None]
"""Starts kernels that read and write only memory that stays."""


class DecodeGraphs:
    """Runs the decode steps of a trunk, and replays a step whose shape it has seen before.

    Args:
        trunk: the layers, on CUDA.
        capture: returns what repeats the kernels of some work, without running them now; such as `Capture`.
    """

    def __init__(self, trunk: Step, capture: Callable[[Work], Work]) -> None:
        self._trunk = trunk
        self._capture = capture
        self._memory: object = None
        """The memory of the cache that the graphs read."""
        self._steps: dict[tuple[int, int], Work] = {}
        """The first step of a shape runs its operators, which also prepares libraries; the second is captured."""
        self._replays: dict[tuple[int, int], Work] = {}
        self._fails = False

    def step(self, cache: KVCache | PagedKVCache, tokens_B: Tensor, positions_B: Tensor, longest: int) -> Tensor:
        """Return the hidden states [B, H] of one step, which stay until the next one; see `Decoder.step`."""
        if self._memory is not cache.memory:
            self._begin(cache, tokens_B)
        count = len(tokens_B)
        if isinstance(cache, PagedKVCache):
            table_BW, longest = cache.advance(count)
            self._table[:count, : table_BW.shape[1]] = table_BW
            self._table[count:] = 0  # these rows may have had pages that others have now
            longest -= 1
        rows = min(cache.slots, 1 << (count - 1).bit_length())
        length = min(cache.length, -(-(longest + 1) // PAGE) * PAGE)
        # rows without a text write to slots that are free, or to the page that no text has
        for given, held in ((tokens_B, self._tokens), (positions_B, self._positions)):
            held[:count] = given
            held[count:rows] = 0
        cache.reach(length)
        self._run(cache, rows, length)
        return self._hidden[0][:count]

    def _begin(self, cache: KVCache | PagedKVCache, tokens_B: Tensor) -> None:
        """Allocate what all graphs of a cache read and write."""
        self._memory = cache.memory
        self._steps, self._replays = {}, {}
        self._tokens, self._positions = (tokens_B.new_zeros(cache.slots) for _ in range(2))
        pages = cache.pages_of(cache.length) if isinstance(cache, PagedKVCache) else 0
        self._table = torch.zeros(cache.slots, pages, dtype=torch.int32, device=tokens_B.device)
        self._hidden: list[Tensor] = []

    def _run(self, cache: KVCache | PagedKVCache, rows: int, length: int) -> None:
        """Run one step of so many rows, of up to `length` tokens with the new one."""
        shape = (rows, length)
        if (replay := self._replays.get(shape)) is not None:
            replay()
            return
        if (step := self._steps.get(shape)) is None:
            step = self._steps[shape] = self._step(cache, rows, length)
        elif not self._fails:
            try:
                self._replays[shape] = self._capture(step)
                self._replays[shape]()
                return
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # whatever a kernel raises that cannot be captured
                self._fails = True
                logger.warning("decode steps run without CUDA graphs, since capture failed: %s", error)
        step()

    def _step(self, cache: KVCache | PagedKVCache, rows: int, length: int) -> Work:
        # without `self`, a cycle that would keep the weights until the next garbage collection, and with a weak
        # reference, since a sampler that sleeps frees its cache
        trunk, made, held = self._trunk, self._hidden, ref(cache)
        tokens, positions, table = self._tokens[:rows], self._positions[:rows], self._table[:rows]

        def step() -> None:
            context: DecodeContext | PagedDecodeContext
            cache = held()
            assert cache is not None, "a step runs on the cache with which it was called"
            if isinstance(cache, PagedKVCache):
                context = PagedDecodeContext(cache, positions, table, length)
            else:
                context = DecodeContext(cache, positions, length - 1)
            hidden = trunk(tokens, positions, context)
            if not made:  # in the first step, which is not captured
                made.append(hidden.new_empty(cache.slots, hidden.shape[1]))
            made[0][:rows] = hidden

        return step


class Capture:
    """Captures work as CUDA graphs that share the memory of their intermediate results."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # one, since memory is reused within a stream only

    def __call__(self, work: Work) -> Work:
        """Return the replay of a graph of the work."""
        stream = self._stream
        with torch.cuda.device(stream.device):
            graph = torch.cuda.CUDAGraph()
            stream.wait_stream(torch.cuda.current_stream())
            # not `torch.cuda.graph`, which collects garbage and waits for the device at each capture
            with torch.cuda.stream(stream):
                # another thread may train meanwhile (rollout=async)
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
            torch.cuda.current_stream().wait_stream(stream)
        return graph.replay


@cache
def why_no_graphs(device: torch.device) -> str | None:
    """Return why this process cannot replay graphs on a CUDA device, or None if it can."""
    x = torch.zeros(1, device=device)

    def work() -> None:
        x.add_(1)

    work()  # loads the kernel, which a capture does not
    try:
        Capture(device)(work)()
    except (RuntimeError, AttributeError) as error:  # a build of torch or a driver without graphs
        return f"CUDA graphs fail here: {error}".splitlines()[0]
    return None if int(x) == 2 else "CUDA graphs give wrong results here"


__all__ = ["Capture", "DecodeGraphs", "Work", "why_no_graphs"]

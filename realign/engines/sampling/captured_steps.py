"""Decode steps of a `FusedTrunk` captured as CUDA graphs, which launch all kernels of a step at once.

A graph repeats kernels with fixed shapes and addresses. Therefore the number of rows and the length that attention
reads are rounded up, tokens and positions are copied to fixed inputs, and weights and KV cache are in `KeptMemory`.
Rows that fill up a step write to free slots, which the next prompt in such a slot overwrites.

Shapes: B rows being decoded, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from realign.engines.network.decoder import PackedCache, PackedDecoder
from realign.engines.network.kv_cache import DecodeContext
from realign.engines.sampling.compiled.fused_layers import FusedTrunk

SHORTEST = 256
"""Smallest length that attention reads in a captured step, in tokens."""

MOST_CACHES = 4
"""Number of KV caches of concurrent rollouts for which captured steps are kept."""

Step: TypeAlias = Callable[[], Tensor]


class Captures(Protocol):
    """Captures a function of tensors with fixed shapes and addresses."""

    def capture(self, run: Step) -> Step:
        """Return a function that repeats the kernels of `run`, with a result in fixed memory."""
        ...


class CudaGraphs:
    """Captures CUDA graphs, which share a memory pool. Implements `Captures`."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Step) -> Step:
        """See `Captures.capture`. Other threads may use the device during the capture."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries allocate their workspaces in the first run
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class _Captured(NamedTuple):
    """A captured step, its inputs, and the objects whose memory it uses."""

    tokens: Tensor
    positions: Tensor
    replay: Step
    uses: tuple[object, ...]


class CapturedSteps:
    """The captured steps of an engine, by addresses, number of rows and length."""

    def __init__(self, captures: Captures) -> None:
        self._captures = captures
        self._steps: dict[tuple[object, int, int], _Captured] = {}
        self._latest: tuple[object, ...] = ()
        self._addresses: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self._steps)

    def clear(self) -> None:
        """Drop all captured steps."""
        self._steps.clear()
        self._latest = ()

    def run(self, trunk: FusedTrunk, cache: PackedCache, tokens_B: Tensor, positions_B: Tensor, longest: int) -> Tensor:
        """Run a decode step, see `Decoder.step`. The result is valid until the next step."""
        self._find_addresses(trunk, cache)
        rows = min(cache.slots, _power_of_two(len(tokens_B)))
        length = min(cache.length, max(SHORTEST, _power_of_two(longest + 1)))
        cache.reach(length)
        key = (self._addresses, rows, length)
        if key not in self._steps:
            self._steps[key] = self._new_step(trunk, cache, rows, length)
        step, count = self._steps[key], len(tokens_B)
        step.tokens[:count].copy_(tokens_B)
        step.positions[:count].copy_(positions_B)
        step.positions[count:].zero_()
        return step.replay()[:count]

    def _find_addresses(self, trunk: FusedTrunk, cache: PackedCache) -> None:
        """Set the addresses and sizes with which a step was captured, if the trunk or the cache has changed."""
        latest = (trunk, cache, cache.slots, cache.length)
        if latest == self._latest:
            return
        caches = [x for layer in range(len(trunk.layers)) for x in cache.kv[layer]]
        tensors = [*_tensors(trunk.layers), *_tensors(trunk.norm), trunk.embedding, trunk.turns, *caches]
        addresses = (cache.slots, cache.length, *(x.data_ptr() for x in tensors))
        if len({known for known, _, _ in self._steps} | {addresses}) > MOST_CACHES:
            self.clear()
        self._latest, self._addresses = latest, addresses

    def _new_step(self, trunk: FusedTrunk, cache: PackedCache, rows: int, length: int) -> _Captured:
        """Capture a step. The first run writes to the last position, which each row writes before it reads it."""
        tokens_B = torch.zeros(rows, dtype=torch.int64, device=trunk.embedding.device)
        positions_B = torch.full_like(tokens_B, length - 1)

        def run() -> Tensor:
            return trunk(tokens_B, positions_B, DecodeContext(cache.kv, positions_B, length - 1))

        return _Captured(tokens_B, positions_B, self._captures.capture(run), (trunk, cache.kv))


class CapturedDecoder(PackedDecoder):
    """A `PackedDecoder` with captured decode steps."""

    def __init__(self, trunk: FusedTrunk, steps: CapturedSteps) -> None:
        super().__init__(trunk)
        self._fused = trunk
        self._steps = steps

    @override
    def step(self, cache: PackedCache, tokens_B: Tensor, positions_B: Tensor, longest: int) -> Tensor:
        return self._steps.run(self._fused, cache, tokens_B, positions_B, longest)


def _tensors(x: Any) -> Iterator[Tensor]:
    """Iterate over the tensors of nested tuples and lists."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, tuple | list):
        for part in x:
            yield from _tensors(part)


def _power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()

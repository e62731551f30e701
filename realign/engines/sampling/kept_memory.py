"""`KeptMemory`: memory that the rollouts of an engine use again, instead of allocating it for each rollout."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")


class KeptMemory:
    """Memory of joined weights, and blocks of KV caches that no rollout uses.

    Weights have one place each, since all rollouts of an engine use the same weights. A block of a KV cache belongs to
    one rollout at a time.
    """

    def __init__(self) -> None:
        self._weights: dict[Hashable, Tensor] = {}
        self._blocks: dict[Hashable, list[Tensor]] = {}

    def copied(self, name: Hashable, x: Tensor) -> Tensor:
        """Copy a tensor into the memory of the last tensor with this name, if that is large enough.

        Args:
            name: name of the weight.
            x: a tensor without gaps in memory; the copy has the same strides.
        """
        kept = self._weights.get(name)
        if kept is None or not _fits(kept, x.numel(), x):
            kept = self._weights[name] = x.new_empty(x.numel())
        return kept.as_strided(x.size(), x.stride()).copy_(x)

    def take(self, name: Hashable, elements: int, like: Tensor) -> Tensor:
        """Return an uninitialized block [at least `elements`] that no other rollout uses.

        A block that is too small is replaced.

        Args:
            name: name of the part of the cache.
            elements: number of elements.
            like: tensor with the dtype and the device of the block.
        """
        blocks = self._blocks.setdefault(name, [])
        fitting = [i for i, block in enumerate(blocks) if _fits(block, elements, like)]
        if fitting:
            return blocks.pop(min(fitting, key=lambda i: blocks[i].numel()))
        if blocks:
            blocks.pop()
        return like.new_empty(elements)

    def give_back(self, name: Hashable, block: Tensor) -> None:
        """Return a block from `take`."""
        self._blocks.setdefault(name, []).append(block)

    def free(self) -> None:
        """Free all memory that no rollout uses."""
        self._weights.clear()
        self._blocks.clear()

    @property
    def weight_bytes(self) -> int:
        """Memory of weights, in bytes."""
        return sum(x.nbytes for x in self._weights.values())

    @property
    def cache_bytes(self) -> int:
        """Memory of blocks that no rollout uses, in bytes."""
        return sum(x.nbytes for blocks in self._blocks.values() for x in blocks)


def _fits(kept: Tensor, elements: int, like: Tensor) -> bool:
    return kept.numel() >= elements and kept.dtype == like.dtype and kept.device == like.device


def copied_all(x: T, name: str, memory: KeptMemory) -> T:
    """Copy the tensors of nested named tuples into kept memory. Other values stay as they are."""
    if isinstance(x, Tensor):
        return memory.copied(name, x)  # type: ignore[return-value]
    fields: tuple[str, ...] = getattr(x, "_fields", ())
    return type(x)(*(copied_all(getattr(x, field), f"{name}.{field}", memory) for field in fields)) if fields else x

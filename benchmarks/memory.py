"""Memory that a piece of work takes, counted exactly: the same numbers on a busy machine as on an idle one."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryCount(TorchDispatchMode):
    """Bytes of the tensors that operations inside make, while they live; what existed before counts nothing.

    Memory that an operation takes and frees by itself (a kernel's workspace) is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        """Bytes now."""
        self.peak = 0
        """Most bytes at once."""
        self.largest = 0
        """Elements of the largest tensor."""
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the operation and count what it returns, unless it is a view of something known."""
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor):
                self._known.add(x.untyped_storage())
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self._count(x)
        return result

    def _count(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if storage in self._known:
            return
        self._known.add(storage)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        self.largest = max(self.largest, storage.nbytes() // x.element_size())
        weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, n_bytes: int) -> None:
        self.live -= n_bytes

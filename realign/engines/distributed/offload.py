"""Offload an engine's tensors to the host while the device runs another engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class Offload:
    """Moves tensors to the host and back in place, so existing references remain valid.

    No computation may use them between `leave` and `come_back`. On a CPU both methods do nothing.
    """

    def __init__(self, resident: Callable[[], Iterable[Tensor]], free: Callable[[], None] = lambda: None) -> None:
        """Set the functions that `leave` calls.

        Args:
            resident: lists the tensors to move, such as `TransformersEngine.resident`.
            free: frees memory that need not move, such as `TransformersEngine.free_kept_memory`.
        """
        self._resident = resident
        self._free = free
        self._away: list[tuple[Tensor, torch.device]] = []

    def leave(self) -> None:
        """Move all tensors to the host."""
        self._free()
        for x in {id(x): x for x in self._resident()}.values():
            if x.device.type != "cpu":
                self._away.append((x, x.device))
                host = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)  # torch caches pinned memory
                x.data = host.copy_(x.detach())

    def come_back(self) -> None:
        """Move the tensors back to their devices."""
        for x, device in self._away:
            x.data = x.detach().to(device, non_blocking=True)
        if any(device.type == "cuda" for _, device in self._away):
            torch.cuda.synchronize()  # the host memory may be reused after this
        self._away.clear()

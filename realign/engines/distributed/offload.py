"""What an engine keeps on its device waits on the host while the device works for another one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class Offload:
    """Moves tensors to the host and back. They stay the same objects, so whoever holds one sees it move.

    Between `leave` and `come_back` nothing may compute with them. On a CPU both do nothing.
    """

    def __init__(self, resident: Callable[[], Iterable[Tensor]]) -> None:
        """Move what `resident` gives at the time, such as `TransformersEngine.resident`."""
        self._resident = resident
        self._away: list[tuple[Tensor, torch.device]] = []

    def leave(self) -> None:
        """Move all tensors to the host."""
        for x in {id(x): x for x in self._resident()}.values():
            if x.device.type != "cpu":
                self._away.append((x, x.device))
                host = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)  # torch keeps such memory for reuse
                x.data = host.copy_(x.detach())

    def come_back(self) -> None:
        """Move them to where they were."""
        for x, device in self._away:
            x.data = x.detach().to(device, non_blocking=True)
        if any(device.type == "cuda" for _, device in self._away):
            torch.cuda.synchronize()  # the memory on the host may be given away
        self._away.clear()

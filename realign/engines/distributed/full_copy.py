"""Full copy of a sharded network, for rollouts and for saving."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from realign.engines.distributed.shards import whole
from realign.engines.network.value_head import ValueNetwork


class GatheredCopy:
    """Unsharded modules of the same classes as a sharded network. They are empty until weights are gathered.

    Attributes:
        module: a transformers model.
        value_head: its separate value network, or None.
    """

    def __init__(self, module: Any, value_head: ValueNetwork | None) -> None:
        """Copy the modules without their weights. The modules must not be sharded yet."""
        parts = {"module": module} if value_head is None else {"module": module, "value_head": value_head}
        self._device = next(module.parameters()).device
        memo: dict[int, Any] = {}
        for part in parts.values():
            for p in part.parameters():
                memo.setdefault(id(p), nn.Parameter(p.detach().new_empty(0), requires_grad=False))
        parts = copy.deepcopy(parts, memo)
        self.module: Any = parts["module"]
        self.value_head: ValueNetwork | None = parts.get("value_head")
        self._all = nn.ModuleDict(parts)
        self._current = False

    def current(self, sharded: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> Any:
        """Return the model with the current weights on its device; collective. Gathers only if the copy is outdated.

        Args:
            sharded: this rank's shards of the weights, by name.
            buffers: buffers, by name.
        """
        if not self._current:
            self.fill(sharded, buffers, self._device)
            self._current = True
        return self.module

    def outdate(self) -> None:
        """Mark the gathered weights as outdated, after the weights have changed."""
        self._current = False

    @torch.no_grad()
    def fill(self, sharded: Mapping[str, Tensor], buffers: Mapping[str, Tensor], device: torch.device | None) -> None:
        """Gather the current weights on `device`, one by one; collective. With None, the rank only participates."""
        self.outdate()
        own = dict(self._all.named_parameters())
        for name, part in sharded.items():
            x = whole(part.detach())
            if device is not None:
                own[name].data = x.to(device)
        for name, buffer in self._all.named_buffers():
            buffer.copy_(buffers[name])

    def empty(self) -> None:
        """Free the gathered weights."""
        self.outdate()
        for p in self._all.parameters():
            p.data = torch.empty(0, device=self._device)

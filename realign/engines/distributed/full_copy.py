"""A whole copy of a sharded network: what rollouts run, and what is written to a folder."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from realign.engines.distributed.shards import whole
from realign.engines.network.value_head import ValueNetwork


class GatheredCopy:
    """Modules of the same classes, without weights until they are gathered; ordinary ones, that no rank shares.

    Attributes:
        module: a transformers model.
        value_head: beside it, where there is one.
    """

    def __init__(self, module: Any, value_head: ValueNetwork | None) -> None:
        """Copy the modules, whose parameters are still whole, but not their weights."""
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
        """The model with the weights of now on its device; gathered anew only after `outdate`. A collective.

        Args:
            sharded: the parts of the weights by name.
            buffers: by name.
        """
        if not self._current:
            self.fill(sharded, buffers, self._device)
            self._current = True
        return self.module

    def outdate(self) -> None:
        """The weights have changed: what was gathered before must not be used."""
        self._current = False

    @torch.no_grad()
    def fill(self, sharded: Mapping[str, Tensor], buffers: Mapping[str, Tensor], device: torch.device | None) -> None:
        """Gather the weights of now on `device`, one after the other; None: take part only. A collective."""
        self.outdate()
        own = dict(self._all.named_parameters())
        for name, part in sharded.items():
            x = whole(part.detach())
            if device is not None:
                own[name].data = x.to(device)
        for name, buffer in self._all.named_buffers():
            buffer.copy_(buffers[name])

    def empty(self) -> None:
        """Free the weights."""
        self.outdate()
        for p in self._all.parameters():
            p.data = torch.empty(0, device=self._device)

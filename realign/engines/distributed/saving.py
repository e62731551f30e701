"""`ShardedSaver`: writes the folders of a sharded engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from realign.engines.distributed.fsdp import ShardedNetwork
from realign.engines.distributed.ranks import Ranks
from realign.engines.training.ema import WeightAverage
from realign.engines.training.saving import ModelSaver, check_finite


class ShardedSaver(ModelSaver):
    """A `ModelSaver` whose methods all ranks call. Rank 0 gathers the weights on the host and writes them."""

    _network: ShardedNetwork

    def __init__(
        self, name: str, network: ShardedNetwork, tokenizer: Any, average: WeightAverage | None, ranks: Ranks
    ) -> None:
        super().__init__(name, network, tokenizer, average)
        self._ranks = ranks

    def _check(self) -> None:
        """Leave the check to `_write`, which gathers the weights."""

    def _write(self, path: Path, write: Callable[[Any, Path], None], *, with_value_head: bool) -> None:
        gathered = self._network.gather(torch.device("cpu") if self._ranks.leader else None)

        def save() -> None:
            check_finite(self._name, gathered.module, gathered.value_head)
            self._write_folder(path, gathered.module, gathered.value_head if with_value_head else None, write)

        try:
            self._ranks.lead(save)
        finally:
            self._network.gathered.empty()

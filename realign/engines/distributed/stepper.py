"""`ShardedStepper`: the optimizer of one rank."""

from __future__ import annotations

from torch import Tensor

from realign.engines.distributed.fsdp import ShardedNetwork
from realign.engines.training.optimizer import OptimizerSpec
from realign.engines.training.stepper import Stepper
from realign.errors import ConfigError


class ShardedStepper(Stepper):
    """A stepper over the shards of one rank. The gradient norm is taken over all ranks."""

    def __init__(self, name: str, spec: OptimizerSpec, network: ShardedNetwork) -> None:
        if not spec.elementwise:
            raise ConfigError(
                f"models.{name}.optimizer={spec.label}: it updates whole weights or blocks of them, but each process "
                f"has only shards. Use one process, or an optimizer that works element by element, such as AdamW."
            )
        super().__init__(name, spec, network.owned())
        self._network = network

    def gradient_norm(self) -> Tensor:
        """Return the norm of the whole gradient."""
        return self._network.gradient_norm()

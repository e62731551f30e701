"""`Samplable`: what a decoding loop needs from an engine."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

from realign.api.engine import PipelinableEngine
from realign.engines.network.network import Network
from realign.engines.sampling.resources import RolloutResources


@runtime_checkable
class Samplable(PipelinableEngine, Protocol):
    """Engine over a transformers model whose layers a decoding loop can run."""

    @property
    def module(self) -> Any:
        """The transformers model."""
        ...

    @property
    def network(self) -> Network:
        """The network that training runs."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        ...

    @property
    def resources(self) -> RolloutResources:
        """Settings of the sampler, and the memory that rollouts share."""
        ...

    def free_kept_memory(self) -> None:
        """Free the memory that is kept between rollouts, if any, and the captured steps that use it."""
        ...

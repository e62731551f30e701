"""`Samplable`: what a decoding loop needs from an engine."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

from realign.api.engine import PipelinableEngine
from realign.engines.network.network import Network
from realign.engines.sampling.captured_steps import CapturedSteps
from realign.engines.sampling.kept_memory import KeptMemory


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
    def eos_token_ids(self) -> tuple[int, ...]:
        """End tokens."""
        ...

    @property
    def max_slots(self) -> int | None:
        """Maximum number of sequences decoded concurrently; None: as many as fit."""
        ...

    @property
    def cache_fraction(self) -> float:
        """Fraction of the free memory of a GPU for the KV cache, if `max_slots` is None."""
        ...

    @property
    def sync_every(self) -> int | None:
        """Decode steps between two host synchronizations; None: see `Rollout`."""
        ...

    @property
    def kept_memory(self) -> KeptMemory | None:
        """Memory that is kept between rollouts; None if it is freed."""
        ...

    @property
    def captured_steps(self) -> CapturedSteps | None:
        """Captured decode steps; None if they are not captured."""
        ...

    def free_kept_memory(self) -> None:
        """Free the memory that is kept between rollouts, if any, and the captured steps that use it."""
        ...

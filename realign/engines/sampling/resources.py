"""`RolloutResources`: settings of an engine's own sampler, and what its rollouts keep for the next one."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from realign.engines.sampling.captured_steps import CapturedSteps, CudaGraphs
from realign.engines.sampling.in_process import InProcessSampling
from realign.engines.sampling.kept_memory import KeptMemory
from realign.errors import ConfigError


@dataclass(frozen=True)
class RolloutResources:
    """Settings of the in-process sampler of an engine, and the memory that its rollouts share."""

    settings: InProcessSampling = field(default_factory=InProcessSampling)
    memory: KeptMemory | None = None
    """Memory for weights and KV cache that is kept between rollouts; None allocates it for each rollout."""
    captured: CapturedSteps | None = None
    """Captured decode steps, which require `memory`; None launches each operator."""

    @classmethod
    def of(cls, name: str, settings: InProcessSampling, device: torch.device) -> RolloutResources:
        """Return the resources of the model of a role.

        Args:
            name: the role, for messages.
            settings: settings of its sampler.
            device: device of its weights.

        Raises:
            ConfigError: `cuda_graphs` requires another device, or memory that is kept.
        """
        if settings.cuda_graphs and (device.type != "cuda" or not settings.keep_memory):
            raise ConfigError(f"models.{name}.sampler.cuda_graphs=true: requires device=cuda and keep_memory=true.")
        memory = KeptMemory() if settings.keep_memory else None
        return cls(settings, memory, CapturedSteps(CudaGraphs()) if settings.cuda_graphs else None)

    def free(self) -> None:
        """Free the memory that is kept between rollouts, if any, and the captured steps that use it."""
        if self.captured is not None:
            self.captured.clear()
        if self.memory is not None:
            self.memory.free()

"""`InProcessSampling`: settings for sampling with a role's own engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from realign.api.in_process_sampler import IN_PROCESS
from realign.api.sampler import Capabilities
from realign.api.sampler_spec import SamplerSpec
from realign.settings import Count


@dataclass
class InProcessSampling(SamplerSpec):
    """Samples with the weights of the training engine, or with a copy of them if rollout=async."""

    external: ClassVar[bool] = False

    max_slots: Count | None = None
    """Maximum number of sequences decoded concurrently; null: as many as fit 1 GiB of KV cache."""

    def capabilities(self) -> Capabilities:
        """See `SamplerSpec.capabilities`."""
        return IN_PROCESS

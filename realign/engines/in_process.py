"""`InProcessSampling`: settings of sampling with a role's own engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from realign.api.in_process_sampler import IN_PROCESS
from realign.api.sampler import Capabilities, SamplerSpec


@dataclass
class InProcessSampling(SamplerSpec):
    """The engine samples with the weights that it trains; with rollout=async, a copy of it in the same process.

    Attributes:
        max_slots: sequences decoded at once; null: as many as fit 1 GiB of KV cache.
    """

    external: ClassVar[bool] = False

    max_slots: int | None = None

    def __post_init__(self) -> None:
        if self.max_slots is not None and self.max_slots < 1:
            raise ValueError(f"max_slots must be at least 1, or null, found {self.max_slots}")

    def capabilities(self) -> Capabilities:
        """See `SamplerSpec.capabilities`."""
        return IN_PROCESS

"""`NetworkSettings`: how a network computes its passes. Reading them does not import transformers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

import torch

from realign.models.network.kernels import Backend
from realign.models.network.passes import ParallelPasses, SharedPrompts
from realign.models.network.trains import All, Trained


class TorchCompile(StrEnum):
    """Backend of `torch.compile` for the decoder layers in training and scoring."""

    off = "off"
    """Layers are not compiled."""
    inductor = "inductor"
    """Generates kernels: Triton on CUDA, C++ on CPU."""
    aot_eager = "aot_eager"
    """Captures forward and backward graphs and runs the operators of torch, for debugging."""
    eager = "eager"
    """Captures forward graphs and runs the operators of torch, for debugging."""

    @property
    def compiles(self) -> bool:
        """Whether layers are compiled."""
        return self is not TorchCompile.off


@dataclass(frozen=True)
class NetworkSettings:
    """Settings of a `Network`; see `TransformersModel` for the keys from which they come."""

    dtype: torch.dtype = torch.float32
    """Dtype of matrix products; bfloat16 uses autocast, or on a CPU `rounding`."""
    attention: Backend = Backend.auto
    """Kernel of packed attention."""
    dropout: float = 0.0
    """Rate of the model's dropouts in training passes."""
    trains: Trained = field(default_factory=All)
    """Weights for which the module was prepared, see `Trained.prepare`."""
    vocabulary: int | None = None
    """Number of tokens that can be sampled, counted from id 0; None means all tokens."""
    shared_prompts: SharedPrompts = SharedPrompts.auto
    """Whether to compute the prompt of a group once."""
    fused_rollout: bool = True
    """Run rollouts with fewer operators if the model family supports it."""
    parallel_passes: ParallelPasses = ParallelPasses.auto
    """Whether to compute micro-batches concurrently on a CPU."""
    torch_compile: TorchCompile = TorchCompile.off
    """Backend that compiles the decoder layers for training and scoring."""
    divided: bool = False
    """Whether several ranks divide the weights."""

    def rounds_weights(self, device: torch.device) -> bool:
        """Return whether a device computes bfloat16 by `rounding`; `torch.compile` and FSDP know only autocast."""
        on_cpu = self.dtype == torch.bfloat16 and device.type == "cpu"
        return on_cpu and not self.divided and not self.torch_compile.compiles

    def restrict(self, *, load_balancing: bool) -> NetworkSettings:
        """Return the settings, without parallel passes if load balancing or `torch_compile` rules them out."""
        # routers cannot tell concurrent passes apart, and compilation is not safe in several threads
        if load_balancing or self.torch_compile.compiles:
            return replace(self, parallel_passes=ParallelPasses.off)
        return self

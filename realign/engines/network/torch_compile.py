"""Backends of `torch.compile`, apart from what uses them, which imports transformers."""

from __future__ import annotations

from enum import StrEnum


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

"""A moving average of trained weights, kept beside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class WeightAverage:
    """average = decay * average + (1 - decay) * weights after each optimizer step; it starts as the weights (fp32)."""

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        """Average those of `parameters` that require a gradient; the others do not move."""
        self.decay = decay
        self.parameters = [p for p in parameters if p.requires_grad]
        self.average = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Count in the weights as they are now."""
        for average, parameter in zip(self.average, self.parameters, strict=True):
            average.lerp_(parameter, 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """For a while the model has the averaged weights; then its own again, bit by bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for i, parameter in enumerate(self.parameters):
            kept = parameter.detach().clone()
            parameter.copy_(self.average[i])
            self.average[i] = kept

    @torch.no_grad()
    def restart(self) -> None:
        """Forget the past: the average is the weights as they are now."""
        for average, parameter in zip(self.average, self.parameters, strict=True):
            average.copy_(parameter)

    def state_dict(self) -> dict[str, Any]:
        """The averages, in the order of the parameters."""
        return {"average": self.average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        for average, saved in zip(self.average, state["average"], strict=True):
            average.copy_(saved)

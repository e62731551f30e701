"""Exponential moving average of the trained weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class WeightAverage:
    """Exponential moving average of the weights that require a gradient, in fp32.

    After each optimizer step, average = decay * average + (1 - decay) * weights. The initial average equals the
    weights.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        """Average the entries of `parameters` that require a gradient; frozen parameters are ignored."""
        self.decay = decay
        self.parameters = [p for p in parameters if p.requires_grad]
        self.average = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the current weights."""
        for average, parameter in zip(self.average, self.parameters, strict=True):
            average.lerp_(parameter, 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the averaged weights into the model, and restore the trained weights bit by bit on exit."""
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
        """Reset the average to the current weights."""
        for average, parameter in zip(self.average, self.parameters, strict=True):
            average.copy_(parameter)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, in the order of the parameters."""
        return {"average": self.average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the averages that `state_dict` returned."""
        for average, saved in zip(self.average, state["average"], strict=True):
            average.copy_(saved)

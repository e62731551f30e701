"""Weights of a network by name: copying or mixing them into another network, and their moving average."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

VALUE_HEAD = "value_head."
"""Prefix of the names of a value head's weights; other weights have their names in the transformers model."""


def named_weights(module: nn.Module, value_head: nn.Module | None) -> dict[str, Tensor]:
    """Return each weight and persistent buffer once, by its first name; tied weights appear once to be mixed once."""
    tensors = module.state_dict(keep_vars=True)
    if value_head is not None:
        tensors = {**tensors, **{f"{VALUE_HEAD}{name}": x for name, x in value_head.state_dict(keep_vars=True).items()}}
    # Reversed, so that the first name of a tied weight overwrites the later ones.
    first = {id(x): name for name, x in reversed(tensors.items())}
    return {name: x.detach() for name, x in tensors.items() if first[id(x)] == name}


def check_weights(role: str, own: Mapping[str, Iterable[int]], given: Mapping[str, Iterable[int]], mix: float) -> None:
    """Check that the given weights fit the weights of a role.

    Args:
        role: the role that receives the weights.
        own: shape of each weight of the role.
        given: shape of each given weight.
        mix: fraction of the given weights in the mixture.

    Raises:
        ValueError: a weight is missing, unknown or of another shape, or `mix` is outside (0, 1]. The message names
            the role and the weight.
    """
    if not 0 < mix <= 1:
        raise ValueError(f"models.{role}: mix={mix} must be above 0 and at most 1")
    for name in sorted(own.keys() ^ given.keys()):
        where = "missing in the given weights" if name in own else "not a weight of the model"
        raise ValueError(f"models.{role}: the given weights do not fit: {name!r} is {where}")
    for name, shape in own.items():
        if (needed := list(shape)) != (given_shape := list(given[name])):
            raise ValueError(
                f"models.{role}: the given weights do not fit: {name!r} has shape {given_shape}, expected {needed}"
            )


def shapes_of(weights: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Return the shape of each weight."""
    return {name: x.shape for name, x in weights.items()}


@torch.no_grad()
def mix_into(own: Mapping[str, Tensor], given: Mapping[str, Tensor], mix: float) -> None:
    """Set `own` in place to (1 - mix) * own + mix * given; copy if `mix` is 1 or a tensor is not floating point."""
    for name, x in own.items():
        new = given[name].to(x.device, x.dtype)
        if mix == 1 or not x.is_floating_point():
            x.copy_(new)
        else:
            x.lerp_(new, mix)


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
            trained = parameter.detach().clone()  # the optimizer refers to the parameter, so its values move instead
            parameter.copy_(self.average[i])
            self.average[i] = trained

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

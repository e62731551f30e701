"""Weights of a network by name: what leaves an engine, and how they come into another one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

VALUE_HEAD = "value_head."
"""Before the names of a value head's weights; the others have those of the transformers model."""


def named_weights(module: nn.Module, value_head: nn.Module | None) -> dict[str, Tensor]:
    """Each weight and persistent buffer once, by its first name: tied weights are one, so that no mix counts twice."""
    found = module.state_dict(keep_vars=True)
    if value_head is not None:
        found = {**found, **{f"{VALUE_HEAD}{name}": x for name, x in value_head.state_dict(keep_vars=True).items()}}
    first = {id(x): name for name, x in reversed(found.items())}
    return {name: x.detach() for name, x in found.items() if first[id(x)] == name}


def check_weights(role: str, own: Mapping[str, Iterable[int]], given: Mapping[str, Iterable[int]], mix: float) -> None:
    """Compare what is given with what there is.

    Args:
        role: whose weights they shall become.
        own: the shape of each of its weights.
        given: the shape of each that is given.
        mix: the part of the mixture that is given.

    Raises:
        ValueError: names the role and the weight, for one that is missing, unknown or of another shape, or `mix`
            outside of (0, 1].
    """
    if not 0 < mix <= 1:
        raise ValueError(f"model {role!r}: the mix must be above 0 and at most 1, found {mix}")
    for name in sorted(own.keys() ^ given.keys()):
        where = "is missing in what is given" if name in own else "is unknown to it"
        raise ValueError(f"model {role!r} has other weights: {name!r} {where}")
    for name, shape in own.items():
        if (needed := list(shape)) != (found := list(given[name])):
            raise ValueError(f"model {role!r} has other weights: {name!r} has shape {needed}, given is {found}")


def shapes_of(weights: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """The shape of each."""
    return {name: x.shape for name, x in weights.items()}


@torch.no_grad()
def mix_into(own: Mapping[str, Tensor], given: Mapping[str, Tensor], mix: float) -> None:
    """Make `own` in place (1 - mix) * own + mix * given; with `mix` 1, and where values are no fractions, a copy."""
    for name, x in own.items():
        new = given[name].to(x.device, x.dtype)
        if mix == 1 or not x.is_floating_point():
            x.copy_(new)
        else:
            x.lerp_(new, mix)

"""What is sent between ranks to see that they were given the same batch: a few bytes for each key."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from realign.api.sample import SequenceSample

ROUNDING = 1e-4
"""Of the sum of magnitudes: ranks on other processors may compute fractions that differ in their last bits."""


@dataclass(frozen=True)
class Facts:
    """Of a batch and the call it is for."""

    shape: str
    """Digest of the call, ids, keys and lengths."""
    exact: dict[str, str]
    """Digest of each key of whole numbers or truth values."""
    sums: dict[str, tuple[float, float]]
    """Of each key of fractions: the sum of its values, each weighted by its place, and of their magnitudes."""

    def difference(self, other: Facts) -> str:
        """In what another rank's batch differs; empty if it does not."""
        if self.shape != other.shape:
            return "other ids or lengths"
        for key, digest in self.exact.items():
            if digest != other.exact.get(key):
                return f"other {key!r}"
        for key, (total, size) in self.sums.items():
            theirs, _ = other.sums.get(key, (float("nan"), 0.0))
            if not abs(total - theirs) <= ROUNDING * size:
                return f"other {key!r}"
        return ""


def facts_of(method: str, data: SequenceSample) -> Facts:
    """The facts of a call of `method` with `data`."""
    shape = hashlib.sha256(repr((method, data.ids)).encode())
    for key, lengths in sorted(data.lengths.items()):
        shape.update(key.encode() + lengths.counts.tobytes() + lengths.flat.tobytes())
    fractions = {key for key, x in data.data.items() if x.is_floating_point()}
    return Facts(
        shape.hexdigest(),
        {key: _digest(x) for key, x in data.data.items() if key not in fractions},
        {key: _sums(data[key]) for key in sorted(fractions)},
    )


def _digest(x: Tensor) -> str:
    return hashlib.sha256(x.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def _sums(x: Tensor) -> tuple[float, float]:
    """Of finite values; one that is not counts as 0, or as the largest there is in the place of an infinite one."""
    values = x.detach().double().nan_to_num(posinf=1e30, neginf=-1e30).flatten()
    places = torch.linspace(1, 2, len(values), dtype=torch.float64, device=values.device)
    total, size = torch.stack(((values * places).sum(), values.abs().sum())).tolist()
    return total, size

"""Fingerprints that ranks exchange to verify that they have the same batch and model; a few bytes per tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from realign.api.sample import SequenceSample
from realign.errors import DataError
from realign.models.host import digest
from realign.ranks import Ranks

ROUNDING = 1e-4
"""Tolerance relative to the sum of magnitudes; different processors may round differently."""

_WEIGHT_ROUNDING = 1e-12
"""Tolerance for sums over weights, which are computed in fp64."""
_NO_WEIGHT = ((-1,), 0.0, 0.0)
"""Facts of a weight that a rank does not have."""


@dataclass(frozen=True)
class Facts:
    """Fingerprint of a batch and its call."""

    shape: str
    """Digest of the method, ids, keys and lengths."""
    exact: dict[str, str]
    """Digest of each integer or boolean key."""
    sums: dict[str, tuple[float, float]]
    """For each floating-point key: the position-weighted sum of its values, and the sum of their magnitudes."""

    def difference(self, other: Facts) -> str:
        """Describe how another rank's batch differs; empty if it does not."""
        if self.shape != other.shape:
            return "different ids or lengths"
        for key, own in self.exact.items():
            if own != other.exact.get(key):
                return f"different {key!r}"
        for key, (total, size) in self.sums.items():
            theirs, _ = other.sums.get(key, (float("nan"), 0.0))
            # Written with `not`, so that NaN, for a key that the other rank lacks, counts as a difference.
            if not abs(total - theirs) <= ROUNDING * size:
                return f"different {key!r}"
        return ""


def check_same_batch(role: str, ranks: Ranks, method: str, data: SequenceSample) -> None:
    """Check that all ranks call the same method with the same batch; collective.

    Different batches would make ranks wait for each other forever.

    Raises:
        ValueError: a rank's batch or call differs; the message names the rank and the difference.
    """
    facts_by_rank = ranks.gather(facts_of(method, data))
    for rank, facts in enumerate(facts_by_rank):
        if differing := facts_by_rank[0].difference(facts):
            raise ValueError(
                f"models.{role}: rank {rank} called {method} with a different batch than rank 0, or another method "
                f"({differing}). Interfaces, rewards and data must return the same on every rank."
            )


def check_same_weights(role: str, ranks: Ranks, weights: Mapping[str, Tensor]) -> None:
    """Check that all ranks have loaded the same model; collective.

    Each rank keeps a slice of the model that it loaded. Slices of different models would be combined without an error.

    Raises:
        DataError: a weight differs; the message names the weight and the rank.
    """
    facts_by_rank = ranks.gather(weight_facts(weights))
    for rank, facts in enumerate(facts_by_rank):
        for name in {**facts_by_rank[0], **facts}:
            shape, total, size = facts_by_rank[0].get(name, _NO_WEIGHT)
            own_shape, own_total, _ = facts.get(name, _NO_WEIGHT)
            if shape != own_shape or abs(total - own_total) > _WEIGHT_ROUNDING * size:
                raise DataError(
                    f"models.{role}: weight {name!r} of rank {rank} differs from that of rank 0. All ranks need the "
                    "same model folder."
                )


def check_same_slices(role: str, digests_by_rank: Sequence[tuple[Mapping[str, str], Mapping[str, str]]]) -> None:
    """Check that all ranks have read the same files.

    Each rank has read its own slices, and for this check those of the next rank. Two folders with different weights
    differ in a slice that a rank uses, so that this rank and the one before it disagree.

    Args:
        role: the role, for messages.
        digests_by_rank: for each rank, the digests of its slices, and of those of the next rank as it reads them.

    Raises:
        DataError: a slice differs; the message names the weight and the rank.
    """
    for rank, (_, expected) in enumerate(digests_by_rank):
        after = (rank + 1) % len(digests_by_rank)
        own = digests_by_rank[after][0]
        if differing := [name for name in {**own, **expected} if own.get(name) != expected.get(name)]:
            raise DataError(
                f"models.{role}: weight {differing[0]!r} of rank {after} differs from that of rank {rank}. All ranks "
                "need the same model folder."
            )


def weight_facts(weights: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], float, float]]:
    """Return the shape, the sum and the sum of magnitudes of each weight."""
    sums = []
    for weight in weights.values():
        # A norm with `dtype` sums floats in fp64 without an fp64 copy of the weight, but takes no integers.
        x = weight.detach() if weight.is_floating_point() else weight.double()
        sums.append(torch.stack((x.sum(dtype=torch.float64), torch.linalg.vector_norm(x, 1, dtype=torch.float64))))
    # One transfer for all weights. NaN differs from itself, so a model with a NaN would never equal its copies.
    totals = torch.stack(sums).nan_to_num().tolist() if sums else []
    return {
        name: (tuple(x.shape), total, size) for (name, x), (total, size) in zip(weights.items(), totals, strict=True)
    }


def facts_of(method: str, data: SequenceSample) -> Facts:
    """Compute the fingerprint of a call of `method` with `data`."""
    shape = hashlib.sha256(repr((method, data.ids)).encode())
    for key, lengths in sorted(data.lengths.items()):
        shape.update(key.encode() + lengths.counts.tobytes() + lengths.flat.tobytes())
    fractions = {key for key, x in data.data.items() if x.is_floating_point()}
    return Facts(
        shape.hexdigest(),
        {key: digest(x) for key, x in data.data.items() if key not in fractions},
        {key: _sums(data[key]) for key in sorted(fractions)},
    )


def _sums(x: Tensor) -> tuple[float, float]:
    """Return the position-weighted sum and the sum of magnitudes; NaN counts as 0, infinities as +-1e30."""
    # Infinities become numbers, since their sums would be NaN, which differs from itself.
    values = x.detach().double().nan_to_num(posinf=1e30, neginf=-1e30).flatten()
    # Weights from 1 to 2 by position, so that two exchanged values also change the sum.
    places = torch.linspace(1, 2, len(values), dtype=torch.float64, device=values.device)
    total, size = torch.stack(((values * places).sum(), values.abs().sum())).tolist()
    return total, size

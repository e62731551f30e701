"""Packed sequences: S sequences concatenated in T slots, with their boundaries in `cu_seqlens`.

`cu_seqlens` is int32 [S+1] with a leading 0, the convention of flash-attention. Sequence s occupies the slots from
`cu_seqlens[s]` up to (excluding) `cu_seqlens[s+1]`. A sequence may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def cu_seqlens_of(lengths: Sequence[int] | Tensor) -> Tensor:
    """Compute the boundaries, int32 [S+1], of sequences with these lengths [S].

    Raises:
        ValueError: a length is negative.
    """
    lengths_S = torch.as_tensor(lengths, dtype=torch.int64)
    if bool((lengths_S < 0).any()):
        raise ValueError(f"lengths must not be negative, found {int(lengths_S.min())}")
    return torch.cat([lengths_S.new_zeros(1), lengths_S.cumsum(0)]).to(torch.int32)


def sequence_lengths(cu_seqlens: Tensor) -> Tensor:
    """Return the length of each sequence: int64 [S]."""
    return cu_seqlens.diff().long()


def sequence_index(cu_seqlens: Tensor, size: int | None = None) -> Tensor:
    """Return the index of the sequence of each slot: int64 [T].

    If `size`, which must be T, is given, no device is asked for it.
    """
    lengths_S = sequence_lengths(cu_seqlens)
    sequences_S = torch.arange(len(lengths_S), device=cu_seqlens.device)
    return torch.repeat_interleave(sequences_S, lengths_S, output_size=size)


def position_ids(cu_seqlens: Tensor, size: int | None = None) -> Tensor:
    """Return the position of each slot in its sequence, from 0: int64 [T]; see `sequence_index` for `size`."""
    index_T = sequence_index(cu_seqlens, size)
    return torch.arange(len(index_T), device=cu_seqlens.device) - cu_seqlens.long()[index_T]


def segment_sum(x_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum `x_T` over each sequence: [S], fp32 (fp64 for fp64 input); 0 for an empty sequence.

    The sum of a sequence does not depend on the sequences that it is packed with.
    """
    index_T = _index_like(x_T, cu_seqlens)
    values_T = at_least_fp32(x_T)
    return values_T.new_zeros(len(cu_seqlens) - 1).index_add(0, index_T, values_T)


def broadcast_to_tokens(x_S: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Broadcast each sequence's value to its slots: [S] to [T]."""
    check_shapes(cu_seqlens[1:], x_S=x_S)
    return x_S[sequence_index(cu_seqlens)]


def last_true(mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the packed index of the last True of each sequence: int64 [S]; -1 for a sequence without True."""
    index_T = _index_like(mask_T, cu_seqlens)
    slots_T = torch.arange(len(mask_T), device=mask_T.device).masked_fill(~mask_T, -1)
    none_S = torch.full((len(cu_seqlens) - 1,), -1, device=mask_T.device)
    return none_S.scatter_reduce(0, index_T, slots_T, "amax")


def previous(x_T: Tensor, cu_seqlens: Tensor, fill: float) -> Tensor:
    """Return the value of the preceding slot in the sequence, and `fill` at first slots: [T], the dtype of `x_T`."""
    index_T = _index_like(x_T, cu_seqlens)
    return x_T.roll(1).masked_fill(index_T.diff(prepend=index_T.new_full((1,), -1)) != 0, fill)


def first_of_each(unit_N: Tensor, mask_N: Tensor) -> Tensor:
    """Return [N] bool: the first element of each unit that is in the mask; it stands for the unit in statistics.

    Args:
        unit_N: [N] ints from 0, equal for the elements of a unit, such as the sequences of an episode.
        mask_N: [N] bool.
    """
    check_shapes(mask_N, unit_N=unit_N, mask_N=mask_N)
    place_N = torch.arange(len(unit_N), device=unit_N.device)
    last_U = place_N.new_full((int(unit_N.max()) + 1 if len(unit_N) else 0,), len(unit_N))
    first_U = last_U.scatter_reduce(0, unit_N[mask_N], place_N[mask_N], "amin")
    return mask_N & (first_U[unit_N] == place_N)


def at_least_fp32(x: Tensor) -> Tensor:
    """Convert to fp32, the minimum precision of rewards, log-probs, values and losses. Keeps fp64."""
    return x if x.dtype == torch.float64 else x.float()


def check_shapes(like: Tensor, **tensors: Tensor | None) -> None:
    """Check that tensors have the shape of `like` [N] and do not broadcast.

    Args:
        like: tensor with the required shape, usually the mask.
        tensors: tensors by argument name; None is skipped. A tensor whose name contains `mask` must be bool.

    Raises:
        ValueError: a shape or dtype is wrong. The message names the tensor, and the actual and the expected value.
    """
    if like.ndim != 1:
        raise ValueError(f"packed tensors have one dimension, found shape {tuple(like.shape)}")
    for name, x in tensors.items():
        if x is None:
            continue
        if x.shape != like.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, should be {tuple(like.shape)}")
        if "mask" in name and x.dtype != torch.bool:
            raise ValueError(f"{name} has dtype {x.dtype}, should be torch.bool")


def _index_like(x_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    index_T = sequence_index(cu_seqlens)
    if x_T.shape != index_T.shape:
        raise ValueError(f"x_T has shape {tuple(x_T.shape)}, but cu_seqlens ends at {len(index_T)}")
    return index_T

"""Comparing scores: advantages and rewards shifted and scaled by the statistics of a group or of the batch.

Statistics are taken in fp64 and in two passes, over the masked elements only. Those of the batch pass through
`reduce`, which adds a tensor up over all ranks (the engine provides it; `identity` for one process); a group never
crosses ranks. Every rank must call, also one whose mask is all False. The result is data: no gradient flows.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .packed import at_least_fp32, check_shapes

__all__ = [
    "Reduce",
    "Scope",
    "degenerate_groups",
    "degenerate_rescale",
    "identity",
    "normalize",
    "whiten",
]

Reduce: TypeAlias = Callable[[Tensor], Tensor]
"""Adds a tensor up over all ranks and returns the sum on each."""

DEGENERATE = 1e-6
"""A unit whose standard deviation is at most this fraction of its root mean square holds one value, up to rounding."""


class Scope(StrEnum):
    """The elements that a statistic is taken over."""

    none = "none"
    """No such statistic: nothing is subtracted, or nothing divided."""
    batch = "batch"
    """All masked elements, on all ranks."""
    group = "group"
    """The masked elements of the same group (the responses to one prompt)."""


def identity(x: Tensor) -> Tensor:
    """`reduce` of a single process."""
    return x


@torch.no_grad()
def normalize(
    x_N: Tensor,
    group_N: Tensor,
    mask_N: Tensor,
    *,
    mean: Scope = Scope.batch,
    std: Scope = Scope.batch,
    leave_one_out: bool = False,
    unbiased: bool = False,
    eps: float = 1e-8,
    eps_inside_sqrt: bool = False,
    reduce: Reduce = identity,
) -> Tensor:
    """Compute `(x - mean) / (std + eps)`, with mean and standard deviation over the batch or over each group.

    A unit (a group, or the batch) of fewer than two elements, or of a single repeated value, does not say which element
    is better: its elements become exactly 0.

    Args:
        x_N: [N] of any numeric dtype. Values off the mask are ignored, NaN included.
        group_N: [N] ints, equal for elements of one group; any ids in any order, groups of any sizes.
        mask_N: [N] bool, the elements that count.
        mean: scope of the mean that is subtracted.
        std: scope of the standard deviation (around that scope's own mean) that divides.
        leave_one_out: subtract the mean of the other elements. The standard deviation stays that of the whole unit,
            which bounds the result by K / sqrt(K - 1) for K elements.
        unbiased: divide squared deviations by K - 1 instead of K.
        eps: added to the standard deviation.
        eps_inside_sqrt: add `eps` to the variance instead.
        reduce: sum over ranks, for the statistics of the batch.

    Returns:
        [N] fp32 (fp64 for fp64 input), 0 off the mask.
    """
    check_shapes(mask_N, x_N=x_N, group_N=group_N, mask_N=mask_N)
    x_M = x_N[mask_N].double()
    units = {
        Scope.batch: lambda: batch_moments(x_M, reduce),
        Scope.group: lambda: _group_moments(x_M, group_N[mask_N]),
    }
    moments = {scope: units[scope]() for scope in Scope if scope in units and scope in (mean, std)}
    y_M = x_M
    if mean is not Scope.none:
        of = moments[mean]
        y_M = y_M - of.mean_U[of.unit_M]
        if leave_one_out:
            y_M = y_M * (of.count_U / (of.count_U - 1).clamp(min=1))[of.unit_M]
        y_M = y_M.masked_fill(of.degenerate_U[of.unit_M], 0)
    if std is not Scope.none:
        of = moments[std]
        var_U = of.variance_U(unbiased)
        scale_U = (var_U + eps).sqrt() if eps_inside_sqrt else var_U.sqrt() + eps
        y_M = (y_M / scale_U[of.unit_M]).masked_fill(of.degenerate_U[of.unit_M], 0)
    return _scatter(y_M, x_N, mask_N)


@torch.no_grad()
def degenerate_groups(x_N: Tensor, group_N: Tensor, mask_N: Tensor) -> Tensor:
    """Which groups `normalize` sets to 0: fewer than two masked elements, or all of them equal up to rounding.

    Args:
        x_N: [N].
        group_N: [N] ints.
        mask_N: [N] bool.

    Returns:
        bool, one per group with at least one masked element, in ascending order of ids.
    """
    check_shapes(mask_N, x_N=x_N, group_N=group_N, mask_N=mask_N)
    return _group_moments(x_N[mask_N].double(), group_N[mask_N]).degenerate_U


@torch.no_grad()
def degenerate_rescale(x_N: Tensor, group_N: Tensor, mask_N: Tensor, reduce: Reduce = identity) -> Tensor:
    """B / (B - M): what makes up for M of the B elements standing in groups that `normalize` sets to 0.

    Source: GPG (arXiv:2504.02546, its alpha), where it multiplies the advantages. In a mean over sequences this is the
    same as leaving the constant groups out of the sum and of its divisor. verl's `gpg` counts something else, the
    responses whose reward is 0, before any mean is subtracted: with rewards of 0 and 1 it divides by the share of right
    answers.

    Args:
        x_N: [N] scores.
        group_N: [N] ints.
        mask_N: [N] bool.
        reduce: sum over ranks.

    Returns:
        A scalar, fp64, at least 1; 1 when every group is constant.
    """
    check_shapes(mask_N, x_N=x_N, group_N=group_N, mask_N=mask_N)
    of = _group_moments(x_N[mask_N].double(), group_N[mask_N])
    total, telling = reduce(torch.stack([of.count_U.sum(), of.count_U[~of.degenerate_U].sum()])).unbind(0)
    return torch.where(telling > 0, total / telling.clamp(min=1), 1)


@torch.no_grad()
def whiten(
    x_N: Tensor,
    mask_N: Tensor,
    *,
    shift_mean: bool = True,
    unbiased: bool = False,
    eps: float = 1e-8,
    reduce: Reduce = identity,
) -> Tensor:
    """`(x - mean) / sqrt(var + eps)` over all masked elements, plus the mean again unless it is to be shifted away.

    Source: openai/lm-human-preferences (`whiten`), which takes the population variance.

    Args:
        x_N: [N]. Anything may stand off the mask, NaN included.
        mask_N: [N] bool.
        shift_mean: leave the mean at 0.
        unbiased: divide squared deviations by their number less one.
        eps: added to the variance.
        reduce: sum over ranks.

    Returns:
        [N] fp32 (fp64 for fp64 input), 0 off the mask. Fewer than two elements come back as they are.
    """
    check_shapes(mask_N, x_N=x_N, mask_N=mask_N)
    x_M = x_N[mask_N].double()
    of = batch_moments(x_M, reduce)
    y_M = (x_M - of.mean_U) * torch.rsqrt(of.variance_U(unbiased) + eps)
    if not shift_mean:
        y_M = y_M + of.mean_U
    return _scatter(torch.where(of.count_U < 2, x_M, y_M), x_N, mask_N)


class Moments(NamedTuple):
    """Statistics of U units, and the unit of each of the M masked elements; fp64."""

    unit_M: Tensor
    count_U: Tensor
    mean_U: Tensor
    deviation_U: Tensor
    """Sum of squared deviations from the mean."""
    degenerate_U: Tensor
    """bool: no more than one element, or one value."""

    def variance_U(self, unbiased: bool) -> Tensor:
        return self.deviation_U / (self.count_U - int(unbiased)).clamp(min=1)


def batch_moments(x_M: Tensor, reduce: Reduce) -> Moments:
    """The statistics of fp64 elements over all ranks, as one unit."""
    return _moments(x_M, torch.zeros_like(x_M, dtype=torch.int64), 1, reduce)


def _group_moments(x_M: Tensor, group_M: Tensor) -> Moments:
    ids_U, unit_M = group_M.unique(return_inverse=True)
    return _moments(x_M, unit_M, len(ids_U), identity)


def _moments(x_M: Tensor, unit_M: Tensor, units: int, reduce: Reduce) -> Moments:
    def totals(*columns_M: Tensor) -> tuple[Tensor, ...]:
        table = torch.stack(columns_M)
        return reduce(table.new_zeros(len(table), units).index_add(1, unit_M, table)).unbind(0)

    count_U, sum_U = totals(torch.ones_like(x_M), x_M)
    mean_U = sum_U / count_U.clamp(min=1)
    # Squares are summed around the mean, in a second pass: E[x**2] - E[x]**2 cancels.
    deviation_U, square_U = totals((x_M - mean_U[unit_M]).square(), x_M.square())
    degenerate_U = (count_U < 2) | (deviation_U <= DEGENERATE**2 * square_U)
    return Moments(unit_M, count_U, mean_U, deviation_U, degenerate_U)


def _scatter(y_M: Tensor, x_N: Tensor, mask_N: Tensor) -> Tensor:
    out_N = torch.zeros_like(at_least_fp32(x_N))
    out_N[mask_N] = y_M.to(out_N.dtype)
    return out_N

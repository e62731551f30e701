"""Normalization of advantages and rewards by the statistics of each group or of the batch.

Statistics are computed in fp64 in two passes, over the elements in the mask. `reduce` sums batch statistics over all
ranks; the engine provides it, and `identity` serves a single process. Groups are never split over ranks. Every rank
must call these functions, even if its mask is all False. Results are detached.

`RunningMoments` stores the mean and the standard deviation of all batches so far in fp64 on the host. It merges the
mean and the squared deviations of each batch by the batch's fraction of the total weight, which avoids the cancellation
of subtracting large squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .packed import at_least_fp32, check_shapes

__all__ = [
    "MomentsKind",
    "Reduce",
    "RunningMoments",
    "Scope",
    "degenerate_groups",
    "identity",
    "normalize",
    "score_moments",
    "whiten",
]

Reduce: TypeAlias = Callable[[Tensor], Tensor]
"""Sums a tensor over all ranks and returns the sum on each rank."""

_DEGENERATE = 1e-6
"""Ratio of standard deviation to root mean square up to which a unit is too flat to divide by its deviation."""


class Scope(StrEnum):
    """The elements over which a statistic is computed."""

    none = "none"
    """Do not subtract the mean, or do not divide by the standard deviation."""
    batch = "batch"
    """All elements in the mask, on all ranks."""
    group = "group"
    """The elements in the mask of one group (the responses to one prompt)."""


def identity(x: Tensor) -> Tensor:
    """Return `x`: the `reduce` of a single process."""
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
    counted_N: Tensor | None = None,
) -> Tensor:
    """Compute `(x - mean) / (std + eps)`, with mean and standard deviation over the batch or over each group.

    The elements of a unit (a group, or the batch) become exactly 0 if it has fewer than two elements or is constant.
    Before a division, a unit with a standard deviation of at most `_DEGENERATE` times its root mean square counts as
    constant, since the division would amplify rounding errors. Without a division, small differences remain.

    Args:
        x_N: [N] of any numeric dtype. Values outside the mask are ignored, including NaN.
        group_N: [N] ints, equal for elements of one group; any ids in any order, groups of any sizes.
        mask_N: [N] bool, the elements to normalize.
        mean: scope of the subtracted mean.
        std: scope of the standard deviation, which is computed around the mean of the same scope.
        leave_one_out: subtract the mean of the other elements. The standard deviation is still that of the whole
            unit, which bounds the result by K / sqrt(K - 1) for K elements.
        unbiased: divide squared deviations by K - 1 instead of K.
        eps: added to the standard deviation.
        eps_inside_sqrt: add `eps` to the variance instead.
        reduce: sums batch statistics over ranks.
        counted_N: [N] bool, the elements in the mask that the statistics count, such as one sequence of each episode.
            None counts all of them.

    Returns:
        [N] fp32 (fp64 for fp64 input), 0 outside the mask.
    """
    check_shapes(mask_N, x_N=x_N, group_N=group_N, mask_N=mask_N, counted_N=counted_N)
    mean, std = Scope(mean), Scope(std)
    x_M, counted_M = x_N[mask_N].double(), None if counted_N is None else counted_N[mask_N]
    units = {
        Scope.batch: lambda: batch_moments(x_M, reduce, counted_M),
        Scope.group: lambda: group_moments(x_M, group_N[mask_N], counted_M),
    }
    # Once per scope, also if mean and std share it: batch statistics are a collective call.
    moments = {scope: units[scope]() for scope in Scope if scope in units and scope in (mean, std)}
    y_M = x_M
    if mean is not Scope.none:
        of = moments[mean]
        y_M = y_M - of.mean_U[of.unit_M]
        if leave_one_out:
            # x minus the mean of the K - 1 others is (x - mean) * K / (K - 1).
            y_M = y_M * (of.count_U / (of.count_U - 1).clamp(min=1))[of.unit_M]
        y_M = y_M.masked_fill(of.constant_U[of.unit_M], 0)
    if std is not Scope.none:
        of = moments[std]
        var_U = of.variance_U(unbiased)
        scale_U = (var_U + eps).sqrt() if eps_inside_sqrt else var_U.sqrt() + eps
        y_M = (y_M / scale_U[of.unit_M]).masked_fill(of.degenerate_U[of.unit_M], 0)
    return _scatter(y_M, x_N, mask_N)


@torch.no_grad()
def degenerate_groups(x_N: Tensor, group_N: Tensor, mask_N: Tensor) -> Tensor:
    """Find the groups with fewer than two elements in the mask, or with elements that are equal up to rounding.

    These are the groups that `normalize` sets to 0 if it divides by the standard deviation of each group.

    Args:
        x_N: [N].
        group_N: [N] ints.
        mask_N: [N] bool.

    Returns:
        bool, one per group with at least one element in the mask, in ascending order of ids.
    """
    check_shapes(mask_N, x_N=x_N, group_N=group_N, mask_N=mask_N)
    return group_moments(x_N[mask_N].double(), group_N[mask_N]).degenerate_U


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
    """Compute `(x - mean) / sqrt(var + eps)` over all elements in the mask, and optionally add the mean back.

    Source: openai/lm-human-preferences (`whiten`), which uses the population variance.

    Args:
        x_N: [N]. Values outside the mask are ignored, including NaN.
        mask_N: [N] bool.
        shift_mean: shift the mean to 0. If False, add the mean back.
        unbiased: divide squared deviations by n - 1 instead of n.
        eps: added to the variance.
        reduce: sums over ranks.

    Returns:
        [N] fp32 (fp64 for fp64 input), 0 outside the mask. Fewer than two elements are returned unchanged.
    """
    check_shapes(mask_N, x_N=x_N, mask_N=mask_N)
    x_M = x_N[mask_N].double()
    of = batch_moments(x_M, reduce)
    y_M = (x_M - of.mean_U) * torch.rsqrt(of.variance_U(unbiased) + eps)
    if not shift_mean:
        y_M = y_M + of.mean_U
    return _scatter(torch.where(of.count_U < 2, x_M, y_M), x_N, mask_N)


class Moments(NamedTuple):
    """Statistics of U units, and the unit of each of the M elements in the mask; fp64."""

    unit_M: Tensor
    count_U: Tensor
    mean_U: Tensor
    deviation_U: Tensor
    """Sum of squared deviations from the mean."""
    constant_U: Tensor
    """bool: whether the unit has fewer than two elements, or equal ones: deviations are rounding errors of the mean."""
    degenerate_U: Tensor
    """bool: whether the unit is constant up to `_DEGENERATE`, so that its standard deviation is no divisor."""

    def variance_U(self, unbiased: bool) -> Tensor:
        return self.deviation_U / (self.count_U - int(unbiased)).clamp(min=1)


def batch_moments(x_M: Tensor, reduce: Reduce, counted_M: Tensor | None = None) -> Moments:
    """Compute the statistics of fp64 elements over all ranks, as one unit; see `normalize` for `counted_M`."""
    return _moments(x_M, torch.zeros_like(x_M, dtype=torch.int64), 1, reduce, counted_M)


def group_moments(x_M: Tensor, group_M: Tensor, counted_M: Tensor | None = None) -> Moments:
    ids_U, unit_M = group_M.unique(return_inverse=True)
    return _moments(x_M, unit_M, len(ids_U), identity, counted_M)


def _moments(x_M: Tensor, unit_M: Tensor, units: int, reduce: Reduce, counted_M: Tensor | None) -> Moments:
    def totals(*columns_M: Tensor) -> tuple[Tensor, ...]:
        table = torch.stack(columns_M)
        table = table if counted_M is None else torch.where(counted_M, table, 0)
        return reduce(table.new_zeros(len(table), units).index_add(1, unit_M, table)).unbind(0)

    count_U, sum_U = totals(torch.ones_like(x_M), x_M)
    mean_U = sum_U / count_U.clamp(min=1)
    # A second pass sums squares around the mean, since E[x**2] - E[x]**2 suffers from cancellation.
    deviation_U, square_U = totals((x_M - mean_U[unit_M]).square(), x_M.square())

    def flat_up_to(relative: Tensor | float) -> Tensor:
        return (count_U < 2) | (deviation_U <= relative**2 * square_U)

    # The mean of n equal numbers has a relative error below n * eps.
    constant_U = flat_up_to(count_U * torch.finfo(count_U.dtype).eps)
    return Moments(unit_M, count_U, mean_U, deviation_U, constant_U, constant_U | flat_up_to(_DEGENERATE))


def _scatter(y_M: Tensor, x_N: Tensor, mask_N: Tensor) -> Tensor:
    out_N = torch.zeros_like(at_least_fp32(x_N))
    out_N[mask_N] = y_M.to(out_N.dtype)
    return out_N


class MomentsKind(StrEnum):
    """Weighting of batches in the running moments."""

    cumulative = "cumulative"
    """Weight each batch by its number of elements, for the moments of all elements so far. Uses the sample standard
    deviation (divisor n - 1), as trlX's `RunningMoments`."""
    exponential = "exponential"
    """Weight batches equally, decayed by `beta` per later batch, with bias correction (as in Adam). Uses the
    population standard deviation, as realhf's `ExponentialRunningMeanStd`, but without its minimum std of 0.1 and
    without its clipping of normalized values at 5."""


@dataclass
class RunningMoments:
    """Running mean and standard deviation. They are 0 and 1 before the first update."""

    kind: MomentsKind = MomentsKind.cumulative
    """Weighting of batches: cumulative or exponential."""
    beta: float = 0.999
    """Decay of earlier batches per update, in [0, 1) (realhf's default); only for exponential."""
    eps: float = 1e-5
    """Added to the standard deviation that `normalize` divides by."""
    count: float = field(default=0.0, init=False)
    """Number of elements so far, over all ranks."""

    def __post_init__(self) -> None:
        self.kind = MomentsKind(self.kind)
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta must be in [0, 1), found {self.beta}")
        if not self.eps >= 0:
            raise ValueError(f"eps must be at least 0, found {self.eps}")
        self._mean, self._variance, self._weight = 0.0, 1.0, 0.0

    @property
    def mean(self) -> float:
        """The mean so far."""
        return self._mean

    @property
    def std(self) -> float:
        """The standard deviation so far; 0 for a single element."""
        if self.kind is MomentsKind.exponential or self.count == 0:
            return math.sqrt(self._variance)
        return math.sqrt(self._variance * self.count / max(self.count - 1, 1))

    @property
    def scale(self) -> float:
        """Divisor of `normalize`: `std + eps`, or 1 before the first update and while all values are equal."""
        constant = self.std <= _DEGENERATE * math.hypot(self.mean, self.std)
        return 1.0 if constant or self.count == 0 else self.std + self.eps

    def update(self, x_N: Tensor, mask_N: Tensor, reduce: Reduce = identity) -> None:
        """Update the moments with a batch. A batch without elements changes nothing.

        Args:
            x_N: [N]. Values outside the mask are ignored, including NaN.
            mask_N: [N] bool.
            reduce: sums over ranks. Every rank must call `update`, even if its mask is all False.

        Raises:
            ValueError: a shape is wrong, or a value is not finite.
        """
        check_shapes(mask_N, x_N=x_N, mask_N=mask_N)
        batch = batch_moments(x_N.detach()[mask_N].double(), reduce)
        count, mean, deviation = batch.count_U.item(), batch.mean_U.item(), batch.deviation_U.item()
        if not math.isfinite(deviation):
            raise ValueError("running moments need finite values. Exclude others with the mask")
        # The count is over all ranks, so all of them return here or none does.
        if count == 0:
            return
        if self.kind is MomentsKind.cumulative:
            earlier, weight = self._weight, count
        else:
            earlier, weight = self.beta * self._weight, 1 - self.beta
        self._weight = earlier + weight
        share, step = weight / self._weight, mean - self._mean
        self._mean += share * step
        self._variance = (1 - share) * self._variance + share * deviation / count + share * (1 - share) * step**2
        self.count += count

    def normalize(self, x_N: Tensor) -> Tensor:
        """Compute `(x - mean) / scale`, fp32 (fp64 for fp64 input)."""
        return ((x_N.double() - self.mean) / self.scale).to(at_least_fp32(x_N).dtype)

    def denormalize(self, x_N: Tensor) -> Tensor:
        """Compute `x * scale + mean`, the inverse of `normalize`."""
        return (x_N.double() * self.scale + self.mean).to(at_least_fp32(x_N).dtype)

    def state_dict(self) -> dict[str, float | str]:
        """Return the moments and the kind as JSON-compatible values."""
        numbers = {"mean": self._mean, "variance": self._variance, "weight": self._weight, "count": self.count}
        return {"kind": self.kind.value, **numbers}

    def load_state_dict(self, state: Mapping[str, float | str]) -> None:
        """Restore saved moments.

        Raises:
            ValueError: the saved moments are of the other kind, whose weights are incompatible.
        """
        if state["kind"] != self.kind.value:
            raise ValueError(f"the saved running moments have kind {state['kind']}, expected {self.kind.value}")
        self._mean, self._variance = float(state["mean"]), float(state["variance"])
        self._weight, self.count = float(state["weight"]), float(state["count"])


def score_moments(scores_S: Tensor, reduce: Reduce = identity) -> tuple[float, float]:
    """Return mean and population standard deviation of [S] scores over all ranks, in float64; NaN without scores."""
    scores_S = scores_S.double()
    total, n = reduce(torch.stack([scores_S.sum(), scores_S.new_tensor(len(scores_S))])).tolist()
    mean = total / n if n else math.nan
    squares = float(reduce((scores_S - mean).square().sum()))
    return mean, math.sqrt(squares / n) if n and math.isfinite(squares) else math.nan

"""Running mean and standard deviation, for example of rollout scores or of a critic's returns.

The moments are stored in fp64 on the host. An update computes the mean and the squared deviations of a batch over all
ranks (`normalization.batch_moments`). It then merges them by the batch's fraction of the total weight. This avoids
the cancellation of subtracting large squares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor

from .normalization import DEGENERATE, Reduce, batch_moments, identity
from .packed import at_least_fp32, check_shapes

__all__ = ["MomentsKind", "RunningMoments", "score_moments"]


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
        constant = self.std <= DEGENERATE * math.hypot(self.mean, self.std)
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

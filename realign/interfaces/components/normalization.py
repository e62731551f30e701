"""`Normalization`: scopes of the mean and the standard deviation that normalize advantages or scores."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from realign.functional import Reduce, Scope, normalize
from realign.settings import NonNegative, Settings


@dataclass
class Normalization(Settings):
    """Subtract the mean over one scope, then divide by the standard deviation over one scope.

    Example: GRPO is `Normalization(mean="group", std="group")`, RLOO is
    `Normalization(mean="group", std="none", leave_one_out=True)`, PPO's whitening is the default.
    """

    mean: Scope = Scope.batch
    """Which mean to subtract: over the batch, over the group, or none."""
    std: Scope = Scope.batch
    """Which standard deviation to divide by: over the batch, over the group (around that scope's own mean), or none."""
    leave_one_out: bool = False
    """Leave each element out of the mean that is subtracted from it (RLOO, arXiv:2402.14740)."""
    unbiased: bool = False
    """Use the sample standard deviation (divided by K - 1) instead of the population's."""
    eps: NonNegative = 1e-8
    """Added to the standard deviation. Elements of scopes without variation become exactly 0 even with eps=0."""
    eps_inside_sqrt: bool = False
    """Add `eps` to the variance instead of the standard deviation."""

    @override
    def ineffective(self) -> dict[str, str]:
        unused = "with mean=none. Set mean=batch or mean=group"
        return {"leave_one_out": unused} if self.mean is Scope.none else {}

    @property
    def active(self) -> bool:
        """Whether it changes anything."""
        return (self.mean, self.std) != (Scope.none, Scope.none)

    @property
    def compares_groups(self) -> bool:
        """Whether a statistic is taken over the responses of one prompt."""
        return Scope.group in (self.mean, self.std)

    def __call__(
        self, x_N: Tensor, group_N: Tensor, mask_N: Tensor, reduce: Reduce, counted_N: Tensor | None = None
    ) -> Tensor:
        """Return [N] normalized elements, 0 off the mask; see `realign.functional.normalize`."""
        return normalize(
            x_N,
            group_N,
            mask_N,
            mean=self.mean,
            std=self.std,
            leave_one_out=self.leave_one_out,
            unbiased=self.unbiased,
            eps=self.eps,
            eps_inside_sqrt=self.eps_inside_sqrt,
            reduce=reduce,
            counted_N=counted_N,
        )

    def describe(self, x: str = "A", *, per_minibatch: bool = False) -> str:
        """Return the settings as a formula; `x` is the symbol of what is normalized."""
        if per_minibatch:
            return f"{self.describe(x)} of each mini-batch"
        if not self.active:
            return "none"
        mean = {Scope.none: "", Scope.batch: " - mean(batch)", Scope.group: " - mean(group)"}[self.mean]
        if self.leave_one_out:
            mean = mean.replace(")", " without itself)")
        if self.std is Scope.none:
            return f"{x}{mean}"
        std = f"{'sample' if self.unbiased else 'population'} std({self.std.value})"
        below = f"sqrt({std}^2 + {self.eps:g})" if self.eps_inside_sqrt else f"({std} + {self.eps:g})"
        return f"({x}{mean}) / {below}"

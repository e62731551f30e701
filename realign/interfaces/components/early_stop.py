"""`EarlyStop`: bounds on how far one rollout batch may move the policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from realign.api import Stats, stat_values
from realign.settings import Positive, Range, Settings


@dataclass
class EarlyStop(Settings):
    """Stop learning from a rollout batch once the policy has moved too far.

    The mini-batch that exceeds a bound takes no optimizer step: weights, optimizer state and schedule do not change.
    The remaining mini-batches and epochs of the rollout batch are skipped.
    """

    kl: Positive | None = None
    """Stop when `approx_kl` exceeds this (k3 of the old against the current policy), in nats per token; null: don't."""
    ratio: Annotated[float, Range(gt=1)] | None = None
    """Stop when the mean probability ratio `ratio_mean` exceeds this (realhf: 5); null: don't."""

    @property
    def bounded(self) -> bool:
        """Whether any bound is set."""
        return (self.kl, self.ratio) != (None, None)

    def allows(self, stats: Stats) -> bool:
        """Return whether the mini-batch with these metrics (over all ranks) may take its optimizer step."""
        if not self.bounded:
            return True  # does not read metrics, which would synchronize with the device
        values = stat_values(stats)
        # A mini-batch without trained tokens reports neither metric, and has moved nothing.
        return all(bound is None or values.get(name, 0.0) <= bound for name, bound in self._bounds.items())

    def describe(self) -> str:
        """Return the bounds for the launch table; empty if there are none."""
        return " or ".join(f"{name} above {bound:g}" for name, bound in self._bounds.items() if bound is not None)

    @property
    def _bounds(self) -> dict[str, float | None]:
        return {"approx_kl": self.kl, "ratio_mean": self.ratio}

"""`EntropyBonus`: a term of the loss that keeps the policy from collapsing, with a constant or an adaptive weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from realign.api import Max, Mean, Stats
from realign.functional import Reduce
from realign.settings import Finite, Positive, Settings


@dataclass
class EntropyBonus(Settings):
    """Entropy of the policy's distribution over the next token, subtracted from the loss of every token."""

    coef: Finite = 0.0
    """Weight of the entropy in the loss (nats per token); with `target`, its initial value."""
    target: Positive | None = None
    """Entropy below which the bonus applies, in nats per token, averaged over the trained tokens of the last batch
    (Skywork-OR1, arXiv:2505.22312); null: `coef` is constant and always applies."""
    delta: Positive = 0.005
    """With `target`, `coef` rises by this after each batch with an entropy at or below it, and falls after the others.
    It stays between 0 and `limit`."""
    limit: Positive = 1.0
    """With `target`, the largest `coef`."""

    @override
    def ineffective(self) -> dict[str, str]:
        return {} if self.target is not None else dict.fromkeys(("delta", "limit"), "with target=null. Set target")

    def control(self) -> EntropyControl:
        """Return a new `EntropyControl`, which adapts the coefficient; the actor saves its state."""
        return EntropyControl(self)

    def describe(self) -> str:
        """Return the bonus for the launch table; empty if there is none."""
        if self.target is None:
            return f"coefficient {self.coef:g}" if self.coef else ""
        steps = f"{self.delta:g} more or less per batch below or above {self.target:g} nats per token"
        return f"coefficient {self.coef:g} at first, {steps}, at most {self.limit:g}"


class EntropyControl:
    """The entropy bonus of one interface, with its current coefficient.

    As in TRL (`use_adaptive_entropy`), the bonus applies only while the last entropy is at or below the target. TRL
    adapts the coefficient after each optimizer step, this one after each rollout batch.
    """

    def __init__(self, bonus: EntropyBonus) -> None:
        self.bonus, self.value, self.entropy = bonus, bonus.coef, 0.0

    @property
    def coef(self) -> float:
        """The coefficient that applies now."""
        return self.value if self.bonus.target is None or self.entropy <= self.bonus.target else 0.0

    def update(self, stats: Stats, reduce: Reduce) -> Stats:
        """Adapt the coefficient to the entropy of a rollout batch; returns a metric with the one that applied.

        Args:
            stats: metrics of this rank; without `entropy`, such as those of an overridden loss, nothing changes.
            reduce: sum over ranks, so that the coefficient stays the same on each.
        """
        mean = stats.get("entropy")
        if self.bonus.target is None or not isinstance(mean, Mean):
            return {}
        applied = self.coef
        total, weight = reduce(torch.stack([mean.total.double(), mean.weight.double()])).tolist()
        if weight and math.isfinite(total):
            self.entropy = total / weight
            step = self.bonus.delta if self.entropy <= self.bonus.target else -self.bonus.delta
            self.value = min(max(self.value + step, 0.0), self.bonus.limit)
        return {"entropy_coef": Max(torch.tensor(applied))}

    def state_dict(self) -> dict[str, Any]:
        """Return the coefficient and the last entropy; empty if they never change."""
        return {} if self.bonus.target is None else {"value": self.value, "entropy": self.entropy}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; the state of a constant coefficient leaves the initial one."""
        if self.bonus.target is not None and state:
            self.value, self.entropy = float(state["value"]), float(state["entropy"])

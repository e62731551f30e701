"""GRPO: PPO's clipped loss on rewards compared within a prompt's group; no critic (arXiv:2402.03300).

Reads and writes the same keys as `ppo.py`. Differences from the paper: all tokens of the batch have the same weight
(`aggregation=token_mean`; the paper uses `seq_mean_token_mean`). There is no KL term unless `kl.place` enables it. If
all rewards of a group are equal, its advantages are exactly 0, without a division by a small number.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from realign.api import GenerationConfig
from realign.functional import Scope
from realign.interfaces.components.advantages import AdvantageEstimator, GroupRelative
from realign.interfaces.components.normalization import Normalization
from realign.interfaces.policy import PolicyInterface, dataflow


@dataclass
class GRPOActorInterface(PolicyInterface):
    """The policy of GRPO: rewards compared within the group of a prompt, and no critic."""

    generation: GenerationConfig = field(default_factory=lambda: GenerationConfig(n=8))
    """How to sample responses; `generation.n` is the group size."""
    advantage: AdvantageEstimator = field(default_factory=GroupRelative)
    """Advantage estimator: group_relative, gdpo, max_rl, turn_returns, gae, or your own."""
    adv_norm: Normalization = field(default_factory=lambda: Normalization(mean=Scope.group, std=Scope.group))
    """How to normalize advantages: over which responses to subtract the mean and divide by the standard deviation."""


__all__ = ["GRPOActorInterface", "dataflow"]

"""GRPO: PPO's clipped loss on rewards compared within a prompt's group; no critic (arXiv:2402.03300).

Reads and writes what `ppo.py` does. Differs from the paper: tokens have the same weight over the whole batch
(`aggregation=token_mean`; the paper's is `seq_mean_token_mean`), there is no KL term unless `kl.place` asks for it, and
the advantages of a group whose rewards are all equal are exactly 0 instead of a division by a small number.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from realign.api import GenerationConfig
from realign.functional import Scope
from realign.interfaces.components.advantages import AdvantageEstimator, GroupRelative
from realign.interfaces.components.normalization import Normalization
from realign.interfaces.ppo import PPOActorInterface, dataflow


@dataclass
class GRPOActorInterface(PPOActorInterface):
    """The policy of GRPO: PPO with another advantage."""

    generation: GenerationConfig = field(default_factory=lambda: GenerationConfig(n=8))
    """Sampling settings; `generation.n` is the group size."""
    advantage: AdvantageEstimator = field(default_factory=GroupRelative)
    """Advantage estimator: group_relative, gae, or your own."""
    adv_norm: Normalization = field(default_factory=lambda: Normalization(mean=Scope.group, std=Scope.group))
    """Normalization of advantages: scopes of the mean that is subtracted and of the standard deviation that divides."""


__all__ = ["GRPOActorInterface", "dataflow"]

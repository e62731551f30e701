"""Decoupled PPO: proximal and behavior policy are two policies (arXiv:2110.00641; AReaL, arXiv:2505.24298).

The policy that sampled the tokens (`logprobs`, behavior) may be older than the one that an update starts from, or the
same one computed by another engine. The clip is taken around the policy that the update starts from, recomputed by a
call of the graph (`prox_logprobs`). An importance weight w without gradient corrects for the sampler:

    loss of a token = w * max(-A r, -A clip(r)),    r = current / proximal,    w = proximal / behavior

Reads what PPO reads, `prox_logprobs`, and `versions` for the metrics of staleness. Differs from AReaL by default: a
rejected token is excluded from the divisor of the loss too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from realign.interfaces.components.correction import Correction, ImportanceCorrection
from realign.interfaces.ppo import PPOActorInterface, dataflow


@dataclass
class DecoupledPPOActorInterface(PPOActorInterface):
    """The policy of decoupled PPO: PPO around the recomputed policy, corrected for the policy that sampled."""

    correction: Correction | None = field(default_factory=ImportanceCorrection)
    """Importance correction from the policy that sampled: importance_correction, or your own; null: none."""


__all__ = ["DecoupledPPOActorInterface", "dataflow"]

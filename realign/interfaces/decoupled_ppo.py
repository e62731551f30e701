"""Decoupled PPO: separate proximal and behavior policies (arXiv:2110.00641; AReaL, arXiv:2505.24298).

The policy that sampled the tokens (`logprobs`, behavior) may be older than the policy at the start of the update, or
the same policy computed by another engine. The clip is centered on the policy at the start of the update, recomputed by
a call of the graph (`prox_logprobs`). An importance weight w without gradient corrects for the sampler:

    loss of a token = w * max(-A r, -A clip(r)),    r = current / proximal,    w = proximal / behavior

Reads the keys of PPO, `prox_logprobs`, and `versions` for the staleness metrics. By default it differs from AReaL: a
rejected token is also excluded from the divisor of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from realign.interfaces.components.correction import Correction, ImportanceCorrection
from realign.interfaces.ppo import PPOActorInterface, dataflow


@dataclass
class DecoupledPPOActorInterface(PPOActorInterface):
    """The policy of decoupled PPO: PPO clipped around the recomputed policy, corrected for the behavior policy."""

    correction: Correction | None = field(default_factory=ImportanceCorrection)
    """Importance correction for the behavior policy: importance_correction, or your own; null: none."""


__all__ = ["DecoupledPPOActorInterface", "dataflow"]

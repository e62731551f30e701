"""`LoadBalancing`: settings that balance the load of experts (config node `models.ROLE.load_balancing`).

They are apart from `expert_load` because every launch reads them, and `expert_load` imports transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

from realign.settings import NonNegative, Settings


@dataclass
class LoadBalancing(Settings):
    """Balances the load of experts by an auxiliary loss or by routing biases, and reports the load.

    The loss is added to the loss of the interface: coef * mean over layers of E * sum over experts of (fraction of
    tokens that chose the expert) * (its mean router probability). All tokens count, including prompts. A balanced
    router has the loss K, the number of experts per token.
    """

    coef: NonNegative = 0.001
    """Weight of the auxiliary loss; 0 only reports the load. Needs softmax routers."""
    bias_rate: NonNegative = 0.0
    """Balance by routing biases instead (arXiv:2408.15664): each optimizer step adds this to the bias of experts with
    less than the mean load of their layer, and subtracts it from the others. Needs routers with biases, as in
    deepseek_v3."""

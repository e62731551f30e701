"""TOPR: an off-policy objective with full weight on good responses and bounded weights on bad ones (arXiv:2503.14286).

Use it with `interfaces.actor.objective._target_=examples.topr.Topr`. All other settings of the actor apply unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from realign.interfaces.components import Objective, PolicyTokens


class Topr(Objective):
    """Loss -w A logprobs, with w = 1 where A > 0 and w = min(r, 1) elsewhere. The weight w has no gradient."""

    def loss(self, tokens: PolicyTokens) -> Tensor:
        """Return the loss of every token; see `Objective`."""
        weight_T = torch.where(tokens.advantages_T > 0, 1.0, tokens.ratio_T.detach().clamp(max=1.0))
        return -weight_T * tokens.advantages_T * tokens.logprobs_T

"""An algorithm in one file: GRPO on the ranks of rewards, so that their scale does not matter.

Run it from the folder above, with nothing registered and nothing edited:

    realign experiment=grpo_arithmetic interfaces.actor._target_=examples.rank_grpo.RankGRPOActorInterface
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from realign.api import Model, SequenceSample
from realign.interfaces.grpo import GRPOActorInterface


@dataclass
class RankGRPOActorInterface(GRPOActorInterface):
    """GRPO whose rewards are first replaced by their ranks within the group."""

    spread: float = 1.0
    """Ranks lie between -spread and +spread; equal rewards share a rank. Shows with adv_norm.std=none only."""

    def estimate_advantages(self, model: Model, data: SequenceSample) -> SequenceSample:
        """Rank the rewards of each group, then let GRPO normalise the ranks."""
        ranks_S = torch.full_like(data["rewards"], torch.nan)
        for group in data.group_index().unique():
            here_S = (data.group_index() == group) & data["rewards"].isfinite()
            rewards_G = data["rewards"][here_S]
            above_G = (rewards_G[:, None] > rewards_G).sum(1) - (rewards_G[:, None] < rewards_G).sum(1)
            ranks_S[here_S] = self.spread * above_G.to(rewards_G) / max(1, len(rewards_G) - 1)
        ranked = super().estimate_advantages(model, data.with_sequences(rewards=ranks_S))
        return ranked.with_sequences(rewards=data["rewards"])

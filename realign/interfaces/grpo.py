"""GRPO: PPO's clipped loss on rewards compared within a prompt's group; no critic (arXiv:2402.03300).

Reads and writes what `ppo.py` does. Differs from the paper: tokens weigh the same over the whole batch
(`aggregation=token_mean`; the paper's is `seq_mean_token_mean`), there is no KL term unless `kl.place` asks for it, and
a group whose rewards are all equal gets exactly 0 instead of a division by a small number.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from realign.api import GenerationConfig, Keys, Model, ModelInterface, SequenceSample, Stats, masked_mean
from realign.functional import (
    Level,
    Normalization,
    Scope,
    broadcast_to_tokens,
    degenerate_groups,
    degenerate_rescale,
    normalize,
    segment_sum,
    sequence_index,
)
from realign.interfaces.ppo import KLPlace, PPOActorInterface, dataflow
from realign.interfaces.shaping import total_rewards

__all__ = ["GRPOActorInterface", "dataflow"]


@dataclass
class GRPOActorInterface(PPOActorInterface):
    """The policy of GRPO and, by flags, of Dr. GRPO, RLOO and their kin."""

    generation: GenerationConfig = field(default_factory=lambda: GenerationConfig(n=8))
    """How responses are sampled; `generation.n` is the group size."""
    adv_norm: Normalization = field(default_factory=lambda: Normalization(mean=Scope.group, std=Scope.group))
    """Normalisation of rewards within groups; level=token weighs each response by its length instead."""
    min_group_size: int = 2
    """A group with fewer rewarded responses than this is left out of the loss."""
    rescale_degenerate: bool = False
    """Multiply advantages by B / (B - M), for M of the batch's B responses in groups of equal rewards, which teach
    nothing (GPG, arXiv:2504.02546)."""

    credit = ModelInterface.credit  # a critic would learn nothing here

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generation.n < 2 and Scope.group in (self.adv_norm.mean, self.adv_norm.std):
            raise ValueError(
                f"generation.n={self.generation.n}: a group of one response has nothing to be compared with; "
                "use generation.n of 2 or more, or adv_norm.mean=batch and adv_norm.std=batch with min_group_size=1"
            )
        if self.rescale_degenerate and self.adv_norm.mean is not Scope.group:
            raise ValueError(
                f"rescale_degenerate makes up for groups whose advantages are all 0, and with "
                f"adv_norm.mean={self.adv_norm.mean.value} there are none; set adv_norm.mean=group"
            )
        for name in ("gamma", "lam"):
            if getattr(self, name) not in (getattr(PPOActorInterface, name), 1.0):
                raise ValueError(
                    f"{name}={getattr(self, name):g} has no effect: GRPO gives every token its response's advantage; "
                    "leave it out, or use PPOActorInterface"
                )
        unused = {
            "reward_norm": self.reward_norm.active,
            "reward.whiten": self.reward.whiten,
            "truncation.bootstrap": self.truncation.bootstrap,
            "value": self.value is not None,
        }
        for name, found in unused.items():
            if found:
                raise ValueError(
                    f"{name} has no place in GRPO, which compares the rewards of whole responses by adv_norm; leave it "
                    "out, or use PPOActorInterface"
                )
        if not 1 <= self.min_group_size <= self.generation.n:
            raise ValueError(
                f"min_group_size must be from 1 to generation.n={self.generation.n}, found {self.min_group_size}"
            )

    def _check_normalization(self) -> None:
        """Every level is fine here: that of responses, and that of tokens, which weighs responses by length."""

    def keys(self, method: str) -> Keys:
        """See `ModelInterface.keys`; a baseline has no effect if the mean of the group is subtracted anyway."""
        keys = super().keys(method)
        unread = {"baseline_rewards"} if self.adv_norm.mean is Scope.group else set()
        return replace(keys, uses=keys.uses - unread)

    def compute_advantages(self, model: Model, data: SequenceSample) -> SequenceSample:
        """Add `advantages` [T]: every sampled token of a response gets its reward, normalised within its group."""
        cu_seqlens, group_S = data.cu_seqlens(), data.group_index()
        mask_T = data["loss_mask"]
        scores_S = total_rewards(data)
        if self.kl.place is KLPlace.reward:
            scores_S = scores_S - self.kl_controller.value * segment_sum(self.reward_kl(data), cu_seqlens)
        valid_S = data["rewards"].isfinite() & (segment_sum(mask_T, cu_seqlens) > 0)
        size_S = torch.zeros_like(group_S).index_add(0, group_S, valid_S.long())[group_S]
        valid_S = valid_S & (size_S >= self.min_group_size)
        mask_T = mask_T & broadcast_to_tokens(valid_S, cu_seqlens)
        reduce = model.machine.reduce
        if self.adv_norm.level is Level.token:
            sequence_T = sequence_index(cu_seqlens)
            advantages_T = normalize(scores_S[sequence_T], group_S[sequence_T], mask_T, self.adv_norm, reduce)
        else:
            advantages_S = normalize(scores_S, group_S, valid_S, self.adv_norm, reduce)
            advantages_T = torch.where(mask_T, broadcast_to_tokens(advantages_S, cu_seqlens), 0)
        if self.rescale_degenerate:
            advantages_T = advantages_T * degenerate_rescale(scores_S, group_S, valid_S, reduce)
        return data.with_tokens(advantages=advantages_T, loss_mask=mask_T)

    def credit_formula(self) -> str:
        """How rewards become advantages, for people."""
        return "each token that of its response"

    def batch_stats(self, data: SequenceSample) -> Stats:
        """Metrics of the rollout batch: also, of the groups in the loss, the share whose rewards are all equal."""
        valid_S = segment_sum(data["loss_mask"], data.cu_seqlens()) > 0
        flat_G = degenerate_groups(total_rewards(data), data.group_index(), valid_S)
        return super().batch_stats(data) | {
            "zero_std_fraction": masked_mean(flat_G.float(), torch.ones_like(flat_G)),
        }

    def describe(self, batch_prompts: int) -> dict[str, str]:
        """Rows of the table that is shown at launch."""
        rows = super().describe(batch_prompts)
        if self.rescale_degenerate:
            rows["advantage normalisation"] += ", times B / (B - M)"
        return rows

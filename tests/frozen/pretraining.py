"""PPO-ptx: pretraining text in the mini-batches of a policy (arXiv:2203.02155, eq. 2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from realign.api import SequenceSample
from realign.api.sample import TOKENS


def mix_pretraining(
    part: SequenceSample,
    coef: float,
    loss_weight: Callable[[SequenceSample], Tensor],
    reduce: Callable[[Tensor], Tensor],
) -> SequenceSample:
    """The mini-batch with the pretraining text of its prompts as further sequences.

    The engine divides the whole sum by the policy's weight W. So that the text counts `coef` times its mean over its
    own tokens, each of its N tokens carries the weight `coef * W / N` (key `ptx_weight`), however the mini-batch is
    cut later.

    Args:
        part: has `ptx_input_ids`, `ptx_loss_mask` with lengths of their own, any number of sequences per prompt.
        coef: weight of the mean negative log-likelihood of the text.
        loss_weight: what the engine divides the policy's loss by.
        reduce: sum over ranks.

    Returns:
        The keys of `part` that have one value per token, and `ptx_weight` [T], 0 on the policy's tokens. On the text
        `loss_mask` is False and the other keys are 0.
    """
    lengths = part.lengths[TOKENS]
    policy = part.select([key for key, own in part.lengths.items() if own is lengths or own == lengths])
    text = part.select(["ptx_input_ids", "ptx_loss_mask"]).rename(
        {"ptx_input_ids": TOKENS, "ptx_loss_mask": "ptx_mask"}
    )
    text = replace(text, ids=tuple(("ptx", prompt) for prompt in part.ids))
    mask_T = text["ptx_mask"]
    weight, tokens = reduce(torch.stack([loss_weight(policy).double(), mask_T.sum().double()])).tolist()
    fill = {key: x.new_zeros(len(mask_T)) for key, x in policy.data.items() if key != TOKENS}
    per_token = torch.where(mask_T, coef * weight / max(tokens, 1), 0.0).float()
    policy = policy.with_tokens(ptx_weight=torch.zeros(len(policy[TOKENS])))
    return SequenceSample.gather([policy, text.select([TOKENS]).with_tokens(**fill, ptx_weight=per_token)])


__all__ = ["mix_pretraining"]

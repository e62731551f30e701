"""PPO-ptx: pretraining text in the mini-batches of a policy (arXiv:2203.02155, eq. 2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from realign.api import ModelOutput, SequenceSample, Stats, masked_mean
from realign.api.router_experts import ROUTER_EXPERTS, without_experts
from realign.api.sample import INDEX_KEYS, TOKENS
from realign.api.sampling_mask import SAMPLING_MASK, with_masks
from realign.functional import nll_loss


def mix_pretraining(
    part: SequenceSample,
    coef: float,
    loss_weight: Callable[[SequenceSample], Tensor],
    reduce: Callable[[Tensor], Tensor],
) -> SequenceSample:
    """Add the pretraining text of a mini-batch's prompts as additional sequences.

    The engine divides the whole loss by the policy's weight W. Each of the N tokens of the text has the weight
    `coef * W / N` (key `ptx_weight`). The text loss is therefore `coef` times the mean over its tokens, independent of
    the micro-batch size.

    Args:
        part: mini-batch with `ptx_input_ids` and `ptx_loss_mask`, which have separate lengths and any number of
            sequences per prompt.
        coef: weight of the mean negative log-likelihood of the text.
        loss_weight: returns the divisor of the policy's loss.
        reduce: sum over ranks.

    Returns:
        The keys of `part` that have one value per token, and `ptx_weight` [T], 0 for the policy's tokens. For the text,
        `loss_mask` is False and the other keys are 0. It has no `router_experts` and no `sampling_mask`.
    """
    lengths = part.lengths[TOKENS]
    aligned = {key for key, own in part.lengths.items() if own is lengths or own == lengths}
    aligned -= {ROUTER_EXPERTS, SAMPLING_MASK}
    policy = part.select(aligned)
    text = part.select(["ptx_input_ids", "ptx_loss_mask"]).rename(
        {"ptx_input_ids": TOKENS, "ptx_loss_mask": "ptx_mask"}
    )
    # The policy's sequences have the prompts' ids, and `gather` rejects an id that occurs twice.
    text = replace(text, ids=tuple(("ptx", prompt) for prompt in part.ids))
    mask_T = text["ptx_mask"]
    weight, tokens = reduce(torch.stack([loss_weight(policy).double(), mask_T.sum().double()])).tolist()
    fill = {key: x.new_zeros(len(mask_T), *x.shape[1:]) for key, x in policy.data.items() if key in aligned - {TOKENS}}
    none_S = torch.full((text.n_sequences,), -1, device=mask_T.device)
    per_token = torch.where(mask_T, coef * weight / max(tokens, 1), 0.0).float()
    policy = policy.with_tokens(ptx_weight=torch.zeros(len(policy[TOKENS])))
    text = text.select([TOKENS]).with_tokens(**fill, ptx_weight=per_token)
    text = text.with_sequences(**{key: none_S for key in INDEX_KEYS if key in policy})
    if ROUTER_EXPERTS in part:
        policy, text = policy.merge(part.select([ROUTER_EXPERTS])), without_experts(text)
    if SAMPLING_MASK in part:
        policy, text = policy.merge(part.select([SAMPLING_MASK])), with_masks(text, [None] * text.n_sequences)
    return SequenceSample.gather([policy, text])


def pretraining_loss(output: ModelOutput, minibatch: SequenceSample) -> tuple[Tensor, Stats]:
    """Return the weighted sum of negative log-likelihoods (nats) of the pretraining text, and its metric.

    Args:
        output: output of the model for the micro-batch.
        minibatch: micro-batch with `ptx_weight` [T], see `mix_pretraining`.
    """
    weight_T = minibatch["ptx_weight"]
    nll_T = nll_loss(output.logprobs(where_T=weight_T > 0), weight_T > 0)
    return (weight_T * nll_T).sum(), {"ptx_nll": masked_mean(nll_T, weight_T > 0)}

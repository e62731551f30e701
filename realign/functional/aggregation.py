"""From per-token losses to one number, in two sums that add up over any split of the batch.

    loss = sum over micro-batches of aggregate(...) / sum over micro-batches of aggregation_weight(...)

The second sum is taken over the whole optimizer step and all ranks before the first backward, so how sequences are
packed, cut into micro-batches or spread over ranks changes neither the loss nor the gradient.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from .packed import at_least_fp32, broadcast_to_tokens, check_shapes, segment_sum

__all__ = ["AggregationMode", "aggregate", "aggregation_weight"]


class AggregationMode(StrEnum):
    """How tokens and sequences weigh in the loss."""

    token_mean = "token_mean"
    """Every token weighs the same (DAPO, arXiv:2503.14476): sum over tokens / tokens."""
    seq_mean_token_mean = "seq_mean_token_mean"
    """Every sequence weighs the same (GRPO, arXiv:2402.03300): mean over sequences of the mean over their tokens."""
    seq_mean_token_sum = "seq_mean_token_sum"
    """Mean over sequences of the sum over their tokens."""
    constant = "constant"
    """Sum over tokens / (sequences * a constant), so that length buys nothing (Dr. GRPO, arXiv:2503.20783)."""


def aggregate(x_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, mode: AggregationMode) -> Tensor:
    """The weighted sum of per-token values; divide it by the `aggregation_weight` of the whole step.

    Args:
        x_T: [T] per-token loss; differentiable. Anything may stand off the mask.
        mask_T: [T] bool, the tokens that count.
        cu_seqlens: int32 [S+1].
        mode: a token weighs 1, or 1 / (masked tokens of its sequence) in `seq_mean_token_mean`.

    Returns:
        A scalar, fp32 (fp64 for fp64 input).
    """
    check_shapes(mask_T, x_T=x_T, mask_T=mask_T)
    kept_T = torch.where(mask_T, at_least_fp32(x_T), 0)
    if AggregationMode(mode) is not AggregationMode.seq_mean_token_mean:
        return kept_T.sum()
    count_S = segment_sum(mask_T.to(kept_T.dtype), cu_seqlens).clamp(min=1)
    return (kept_T / broadcast_to_tokens(count_S, cu_seqlens)).sum()


def aggregation_weight(
    mask_T: Tensor, cu_seqlens: Tensor, mode: AggregationMode, *, constant: float | None = None
) -> Tensor:
    """What `aggregate` is divided by, once summed over the step: tokens, or sequences with at least one masked token.

    Args:
        mask_T: [T] bool, after every filter: a token that was rejected or truncated away must not be counted.
        cu_seqlens: int32 [S+1].
        mode: the same as for `aggregate`.
        constant: tokens per sequence in mode `constant` (Dr. GRPO: the length limit of a response), else None.

    Returns:
        A scalar, fp32; 0 when nothing is masked in.

    Raises:
        ValueError: `constant` is missing, not positive, or given to a mode that has none.
    """
    check_shapes(mask_T, mask_T=mask_T)
    mode = AggregationMode(mode)
    if (constant is not None) != (mode is AggregationMode.constant):
        raise ValueError(f"aggregation {mode.value!r} with constant={constant}: give a constant to 'constant' only")
    if constant is not None and not constant > 0:
        raise ValueError(f"constant is a number of tokens per sequence and must be positive, found {constant}")
    if mode is AggregationMode.token_mean:
        return mask_T.sum(dtype=torch.float32)
    sequences = (segment_sum(mask_T, cu_seqlens) > 0).sum(dtype=torch.float32)
    return sequences if constant is None else sequences * constant

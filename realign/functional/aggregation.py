"""Aggregation of per-token losses to a scalar, as the ratio of two sums over micro-batches.

    loss = sum over micro-batches of aggregate(...) / sum over micro-batches of aggregation_weight(...)

The engine computes the second sum over the whole optimizer step and all ranks before the first backward pass. Loss
and gradient therefore do not depend on packing, micro-batches or the number of ranks.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from .packed import at_least_fp32, broadcast_to_tokens, check_shapes, segment_sum

__all__ = ["AggregationMode", "aggregate", "aggregation_weight"]


class AggregationMode(StrEnum):
    """Weighting of tokens and sequences in the loss."""

    token_mean = "token_mean"
    """Equal weight per token (DAPO, arXiv:2503.14476): sum over tokens / number of tokens."""
    seq_mean_token_mean = "seq_mean_token_mean"
    """Equal weight per sequence (GRPO, arXiv:2402.03300): mean over sequences of the mean over their tokens."""
    seq_mean_token_sum = "seq_mean_token_sum"
    """Mean over sequences of the sum over their tokens."""
    constant = "constant"
    """Sum over tokens / (number of sequences * a constant), without length bias (Dr. GRPO, arXiv:2503.20783)."""


def aggregate(x_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, mode: AggregationMode) -> Tensor:
    """Compute the weighted sum of per-token values. Divide it by the `aggregation_weight` of the whole step.

    Args:
        x_T: [T] per-token loss, differentiable. Values outside the mask are ignored.
        mask_T: [T] bool, the tokens to include.
        cu_seqlens: int32 [S+1].
        mode: the weight of a token is 1, or 1 / (its sequence's tokens in the mask) in `seq_mean_token_mean`.

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
    """Compute the divisor of `aggregate`, to sum over the step: tokens, or sequences with a token in the mask.

    Args:
        mask_T: [T] bool, after all filters. It must exclude rejected and truncated tokens.
        cu_seqlens: int32 [S+1].
        mode: the mode of `aggregate`.
        constant: tokens per sequence in mode `constant` (Dr. GRPO: the length limit of a response), else None.

    Returns:
        A scalar, fp32; 0 if the mask is all False.

    Raises:
        ValueError: `constant` is missing or not positive in mode `constant`, or is set in another mode.
    """
    check_shapes(mask_T, mask_T=mask_T)
    mode = AggregationMode(mode)
    if (constant is not None) != (mode is AggregationMode.constant):
        raise ValueError(
            f"mode={mode.value} with constant={constant}: mode=constant needs a constant, and other modes need None"
        )
    if constant is not None and not constant > 0:
        raise ValueError(f"constant (tokens per sequence) must be positive, found {constant}")
    if mode is AggregationMode.token_mean:
        return mask_T.sum(dtype=torch.float32)
    sequences = (segment_sum(mask_T, cu_seqlens) > 0).sum(dtype=torch.float32)
    return sequences if constant is None else sequences * constant

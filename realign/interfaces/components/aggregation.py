"""Aggregation of token losses to a scalar, as the ratio of two sums over micro-batches.

    loss = sum over micro-batches of total(...) / sum over micro-batches of weight(...)

The engine computes the second sum over the whole optimizer step and all ranks before the first backward pass. Loss
and gradient therefore do not depend on packing, micro-batches or the number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from realign.functional import broadcast_to_tokens, segment_sum
from realign.functional.packed import at_least_fp32, check_shapes
from realign.settings import Positive, Settings


@dataclass
class Aggregation(Settings, ABC):
    """Base class. The loss is the sum of `total` over all micro-batches and ranks, divided by the sum of `weight`."""

    @abstractmethod
    def total(self, loss_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return the weighted sum of the losses of a micro-batch; a scalar, fp32 (fp64 for fp64 input).

        Args:
            loss_T: [T], differentiable; values off the mask are ignored.
            mask_T: [T] bool, the tokens that count.
            cu_seqlens: int32 [S+1].
        """

    @abstractmethod
    def weight(self, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return the divisor of the loss for these tokens, a scalar that is summed over micro-batches.

        Args:
            mask_T: [T] bool, after all filters. It must exclude rejected and truncated tokens.
            cu_seqlens: int32 [S+1].
        """

    @abstractmethod
    def describe(self) -> str:
        """Return the aggregation for the launch table."""


@dataclass
class TokenMean(Aggregation):
    """Every token has the same weight: sum over tokens / tokens (DAPO, arXiv:2503.14476)."""

    @override
    def total(self, loss_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
        return _on_mask(loss_T, mask_T).sum()

    @override
    def weight(self, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
        check_shapes(mask_T, mask_T=mask_T)
        return mask_T.sum(dtype=torch.float32)

    @override
    def describe(self) -> str:
        return "token_mean"


@dataclass
class SeqMeanTokenMean(Aggregation):
    """Every sequence has the same weight: mean over sequences of their token means (GRPO, arXiv:2402.03300)."""

    @override
    def total(self, loss_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
        loss_T = _on_mask(loss_T, mask_T)
        count_S = segment_sum(mask_T.to(loss_T.dtype), cu_seqlens).clamp(min=1)
        return (loss_T / broadcast_to_tokens(count_S, cu_seqlens)).sum()

    @override
    def weight(self, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
        return _count_sequences(mask_T, cu_seqlens)

    @override
    def describe(self) -> str:
        return "seq_mean_token_mean"


@dataclass
class SeqMeanTokenSum(Aggregation):
    """Mean over sequences of the sum over their tokens."""

    @override
    def total(self, loss_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
        return _on_mask(loss_T, mask_T).sum()

    @override
    def weight(self, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
        return _count_sequences(mask_T, cu_seqlens)

    @override
    def describe(self) -> str:
        return "seq_mean_token_sum"


@dataclass
class Constant(Aggregation):
    """Sum over tokens / (sequences x a constant), so that length changes nothing (Dr. GRPO, arXiv:2503.20783)."""

    tokens: Positive
    """Tokens per sequence that the sum is divided by; Dr. GRPO takes the length limit of a response."""

    @override
    def total(self, loss_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
        return _on_mask(loss_T, mask_T).sum()

    @override
    def weight(self, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
        return _count_sequences(mask_T, cu_seqlens) * self.tokens

    @override
    def describe(self) -> str:
        return f"constant, {self.tokens:g} tokens per sequence"


def _on_mask(loss_T: Tensor, mask_T: Tensor) -> Tensor:
    check_shapes(mask_T, loss_T=loss_T, mask_T=mask_T)
    return torch.where(mask_T, at_least_fp32(loss_T), 0)


def _count_sequences(mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return how many sequences have a token in the mask; a sequence without one must not weigh."""
    check_shapes(mask_T, mask_T=mask_T)
    return (segment_sum(mask_T, cu_seqlens) > 0).sum(dtype=torch.float32)

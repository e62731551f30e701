"""Loss aggregation from tokens to a scalar: a sum per micro-batch, divided once by the weight of the whole step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from realign.functional import broadcast_to_tokens, segment_sum
from realign.functional.packed import at_least_fp32, check_shapes
from realign.settings import Positive, Settings


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


@dataclass
class Aggregation(Settings, ABC):
    """Base class. The loss is the sum of `total` over all micro-batches and ranks, divided by the sum of `weight`."""

    @abstractmethod
    def total(self, loss_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return the weighted sum of the losses of a micro-batch; a scalar.

        Args:
            loss_T: [T], differentiable; values off the mask are ignored.
            mask_T: [T] bool, the tokens that count.
            cu_seqlens: int32 [S+1].
        """

    @abstractmethod
    def weight(self, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return the divisor of the loss for these tokens, a scalar that is summed over micro-batches."""

    @abstractmethod
    def describe(self) -> str:
        """Return the aggregation for the launch table."""


@dataclass
class _Mode(Aggregation):
    """An aggregation of `realign.interfaces.components.aggregation`."""

    def total(self, loss_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
        """See `Aggregation`."""
        return aggregate(loss_T, mask_T, cu_seqlens, self._mode)

    def weight(self, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
        """See `Aggregation`."""
        return aggregation_weight(mask_T, cu_seqlens, self._mode)

    def describe(self) -> str:
        """See `Aggregation`."""
        return self._mode.value

    @property
    @abstractmethod
    def _mode(self) -> AggregationMode: ...


@dataclass
class TokenMean(_Mode):
    """Every token has the same weight: sum over tokens / tokens (DAPO, arXiv:2503.14476)."""

    _mode = AggregationMode.token_mean


@dataclass
class SeqMeanTokenMean(_Mode):
    """Every sequence has the same weight: mean over sequences of their token means (GRPO, arXiv:2402.03300)."""

    _mode = AggregationMode.seq_mean_token_mean


@dataclass
class SeqMeanTokenSum(_Mode):
    """Mean over sequences of the sum over their tokens."""

    _mode = AggregationMode.seq_mean_token_sum


@dataclass
class Constant(Aggregation):
    """Sum over tokens / (sequences x a constant), so that length changes nothing (Dr. GRPO, arXiv:2503.20783)."""

    tokens: Positive
    """Tokens per sequence that the sum is divided by; Dr. GRPO takes the length limit of a response."""

    def total(self, loss_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
        """See `Aggregation`."""
        return aggregate(loss_T, mask_T, cu_seqlens, AggregationMode.constant)

    def weight(self, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
        """See `Aggregation`."""
        return aggregation_weight(mask_T, cu_seqlens, AggregationMode.constant, constant=self.tokens)

    def describe(self) -> str:
        """See `Aggregation`."""
        return f"constant, {self.tokens:g} tokens per sequence"


__all__ = [
    "Aggregation",
    "AggregationMode",
    "Constant",
    "SeqMeanTokenMean",
    "SeqMeanTokenSum",
    "TokenMean",
    "aggregate",
    "aggregation_weight",
]

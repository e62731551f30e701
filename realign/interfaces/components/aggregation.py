"""Loss aggregation from tokens to a scalar: a sum per micro-batch, divided once by the weight of the whole step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from realign.functional import AggregationMode, aggregate, aggregation_weight
from realign.settings import Positive, Settings


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
    """An aggregation of `realign.functional.aggregation`."""

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


__all__ = ["Aggregation", "Constant", "SeqMeanTokenMean", "SeqMeanTokenSum", "TokenMean"]

"""`QValues`: the action values that `ModelOutput.q_values` returns."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class QValues(NamedTuple):
    """Action values of the tokens of a batch, from K Q heads. State t is the state before token t."""

    online_KT: Tensor
    """[K, T] fp32: Q_k(state t, token t), differentiable."""
    target_T: Tensor
    """[T] fp32: the smallest of the K target heads' values, detached."""
    logprobs_KT: Tensor
    """[K, T] fp32: log softmax(Q_k(state t, .)) at token t, differentiable; the negative of the CQL loss."""


__all__ = ["QValues"]

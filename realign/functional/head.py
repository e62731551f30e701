"""The LM head of a language model, with manual forward and backward passes over chunks of logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .packed import at_least_fp32

__all__ = ["HeadGradients", "LMHead", "Projection", "no_autocast", "wide_dtype"]


@dataclass(frozen=True, eq=False)
class LMHead:
    """The LM head of a language model: logits = softcap * tanh(scale * (h W^T + b) / softcap).

    Without `softcap`, the logits are scale * (h W^T + b). gemma2 uses `softcap`; cohere and granite use `scale`.
    """

    weight_VH: Tensor
    """Weight [V, H]."""
    bias_V: Tensor | None = None
    """Bias [V], or None."""
    scale: float = 1.0
    """Factor on the logits."""
    softcap: float | None = None
    """Bound on the absolute value of a logit; None means no bound."""

    def first(self, words: int) -> LMHead:
        """Return a head restricted to the first `words` tokens of the vocabulary."""
        bias_V = None if self.bias_V is None else self.bias_V[:words]
        return replace(self, weight_VH=self.weight_VH[:words], bias_V=bias_V)

    def to(self, device: torch.device | str) -> LMHead:
        """Return the head on a device; without a copy if it is there."""
        bias_V = None if self.bias_V is None else self.bias_V.to(device)
        return replace(self, weight_VH=self.weight_VH.to(device), bias_V=bias_V)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Compute all logits: [N, V] fp32 (fp64 for fp64 input), differentiable. Intended for sampling (small N)."""
        dtype = _matmul_dtype(hidden_NH, self.weight_VH)
        with no_autocast(hidden_NH):
            logits_NV = at_least_fp32(F.linear(hidden_NH.to(dtype), self.weight_VH.to(dtype)))
            if self.bias_V is not None:
                logits_NV = logits_NV + self.bias_V
            if self.scale != 1:
                logits_NV = logits_NV * self.scale
            return logits_NV if self.softcap is None else self.softcap * torch.tanh(logits_NV / self.softcap)


class Projection(NamedTuple):
    """The computation of logits / temperature from hidden states."""

    scale: float
    softcap: float | None
    temperature: float
    dtype: torch.dtype
    """Dtype of the matrix product."""

    @classmethod
    def of(cls, hidden_NH: Tensor, head: LMHead, temperature: float) -> Projection:
        """Create the projection of `hidden_NH` by `head`, with the temperature."""
        return cls(head.scale, head.softcap, temperature, _matmul_dtype(hidden_NH, head.weight_VH))

    def logits(self, hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
        """Compute logits / temperature of a chunk, in new memory that the caller may overwrite."""
        logits_CV = at_least_fp32(F.linear(hidden_CH.to(self.dtype), weight_VH))
        if bias_V is not None:
            logits_CV.add_(bias_V)
        if self.softcap is not None:
            return logits_CV.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)
        return logits_CV if self.gain == 1 else logits_CV.mul_(self.gain)

    @property
    def gain(self) -> float:
        """The derivative of `logits` with respect to the matrix product, without the soft cap."""
        return self.scale / self.temperature

    def cap_slope(self, logits_CV: Tensor) -> Tensor | None:
        """Compute the factor of the soft cap in the derivative of `logits`, in new memory; None without `softcap`."""
        if self.softcap is None:
            return None
        return (logits_CV * (self.temperature / self.softcap)).square_().neg_().add_(1)


class HeadGradients:
    """Accumulates the required gradients of hidden states, weight and bias over chunks."""

    def __init__(self, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, needed: tuple[bool, ...]) -> None:
        wide = wide_dtype(hidden_NH, weight_VH)
        self.hidden_NH = torch.empty_like(hidden_NH) if needed[0] else None
        self.weight_VH = torch.zeros_like(weight_VH, dtype=wide) if needed[1] else None
        self.bias_V = torch.zeros_like(bias_V, dtype=wide) if bias_V is not None and needed[2] else None

    def add(
        self, rows: slice, grad_CV: Tensor, cap_slope_CV: Tensor | None, hidden_CH: Tensor, weight_VH: Tensor
    ) -> None:
        """Add a chunk, from the gradient `grad_CV` (times the slope of the soft cap) of `hidden_CH @ weight_VH.T`."""
        if cap_slope_CV is not None:
            grad_CV = grad_CV.mul_(cap_slope_CV)
        if self.bias_V is not None:
            self.bias_V += grad_CV.sum(0)
        grad_CV = grad_CV.to(weight_VH.dtype)
        if self.hidden_NH is not None:
            self.hidden_NH[rows] = grad_CV @ weight_VH
        if self.weight_VH is not None and self.weight_VH.dtype == grad_CV.dtype:
            self.weight_VH.addmm_(grad_CV.t(), hidden_CH)
        elif self.weight_VH is not None:
            self.weight_VH += grad_CV.t() @ hidden_CH

    def cast(self, weight_VH: Tensor, bias_V: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the three gradients in the dtypes of their tensors."""
        weight_grad = None if self.weight_VH is None else self.weight_VH.to(weight_VH.dtype)
        bias_grad = None if self.bias_V is None or bias_V is None else self.bias_V.to(bias_V.dtype)
        return self.hidden_NH, weight_grad, bias_grad


def _matmul_dtype(hidden_NH: Tensor, weight_VH: Tensor) -> torch.dtype:
    wider = torch.promote_types(hidden_NH.dtype, weight_VH.dtype)
    device = hidden_NH.device.type
    if wider != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return wider


def no_autocast(x: Tensor) -> torch.autocast:
    """Return a context that disables autocast on the device of `x`, for code with explicit dtypes."""
    return torch.autocast(x.device.type, enabled=False)


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype for everything but the matrix product: fp64 if any tensor is fp64, else fp32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32

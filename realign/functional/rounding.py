"""bf16 on CPUs: weights are rounded to bf16, activations are not, and the backward pass multiplies in bf16.

A rollout and a training pass compute with the same rounded weights, and sum in different orders, as in fp32: their
log-probs differ as little. If activations were rounded too, as by autocast, then orders of summation would round some
of them differently, and after a few layers all of them: log-probs of SmolLM2-135M differ by 0.035 nats on average.
Products of the forward pass are in fp32, or nearly so if a caller provides them (`RoundedWeights.multiply_by`).

Weights are rounded once for all passes and threads of an optimizer step. A CPU compiles a product in bf16 for each
number of rows, which costs as much as the product, so rows are filled up with zeros to few sizes.

Shapes: N rows, R rows with those of zeros, K inputs, M outputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from typing_extensions import override

__all__ = ["RoundedWeights", "active_rounding", "multiplies_bf16", "no_rounding", "round_rows", "rounding"]

_SIZES = 8
"""Numbers of rows that a product can have between a power of two and the next. With 8, 4% of the rows are zeros."""

MultiplyBy: TypeAlias = Callable[[Tensor], Callable[[Tensor], Tensor]]
"""Returns, for a weight [M, K], what computes products [N, M] in fp32 of rows [N, K] with it, rounded to bf16."""

_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")
"""Names in `torch.cpu.get_capabilities` of instructions that multiply bf16 faster than fp32."""


@cache
def multiplies_bf16() -> bool:
    """Return whether this CPU has instructions for products of bf16. Without them bf16 is slower than fp32.

    The instructions decide, not a measured speed, which would make a run's numbers depend on the load of the machine.
    """
    tells: Callable[[], Mapping[str, Any]] = getattr(torch.cpu, "get_capabilities", dict)  # early versions lack it
    found = tells()
    return any(bool(found.get(name)) for name in _INSTRUCTIONS)


def round_rows(x_NK: Tensor) -> Tensor:
    """Return the rows in bf16, followed by rows of zeros up to one of few sizes: [R, K]."""
    rows = len(x_NK)
    step = max(1, (1 << max(0, rows - 1).bit_length()) // (2 * _SIZES))
    rounded_RK = x_NK.new_empty(-(-rows // step) * step, x_NK.shape[1], dtype=torch.bfloat16)
    rounded_RK[:rows] = x_NK
    rounded_RK[rows:] = 0
    return rounded_RK


class RoundedWeight:
    """The values of a weight in bf16."""

    def __init__(self, weight_MK: Tensor, multiply_by: MultiplyBy | None) -> None:
        low_MK = weight_MK.detach().to(torch.bfloat16)
        self.backward_MK = low_MK if multiplies_bf16() else low_MK.float()
        """The values, in the dtype in which the backward pass multiplies."""
        self.product: Callable[[Tensor], Tensor]
        """Returns the product [N, M] in fp32 of rows with the weight."""
        if multiply_by is None:
            self.product = partial(F.linear, weight=self.backward_MK.float())
        else:
            self.product = multiply_by(weight_MK)


class RoundedWeights:
    """The rounded weights of a network. Each is rounded once for the passes between two calls of `forget`.

    The caller forgets them before passes with other values. Versions of tensors would not tell, since a fused optimizer
    doesn't count its steps there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # An entry keeps its weight, so that the memory of the weight holds no other tensor while the entry exists.
        self._known: dict[tuple[int, torch.Size, tuple[int, ...]], tuple[Tensor, RoundedWeight]] = {}
        self.multiply_by: MultiplyBy | None = None
        """What multiplies in the forward pass; None multiplies in torch, in fp32."""
        self.count = 0
        """Number of weights that were rounded, each time counted."""

    def forget(self) -> None:
        """Round all weights again when they are needed."""
        with self._lock:
            self._known.clear()

    def of(self, weight: Tensor) -> RoundedWeight:
        """Return a weight's current values, rounded."""
        key = weight.data_ptr(), weight.shape, weight.stride()
        with self._lock:
            if key not in self._known:
                self._known[key] = weight, RoundedWeight(weight, self.multiply_by)
                self.count += 1
            return self._known[key][1]


class _Active(threading.local):
    weights: RoundedWeights | None = None


_active = _Active()


def active_rounding() -> RoundedWeights | None:
    """Return the rounded weights of the surrounding `rounding`; None outside of it."""
    return _active.weights


@contextmanager
def rounding(weights: RoundedWeights) -> Iterator[None]:
    """Return a context in which linear layers and language-model heads of this thread compute with rounded weights."""
    with _use(weights), _RoundedLinears():
        yield


@contextmanager
def no_rounding() -> Iterator[None]:
    """Return a context in which weights are not rounded, inside of `rounding`."""
    with _use(None):
        yield


@contextmanager
def _use(weights: RoundedWeights | None) -> Iterator[None]:
    before, _active.weights = _active.weights, weights
    try:
        yield
    finally:
        _active.weights = before


class _RoundedLinears(TorchFunctionMode):
    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear and _active.weights is not None:
            return _linear(_active.weights, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _linear(weights: RoundedWeights, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if weight.dtype != torch.float32 or input.dtype != torch.float32:
        return F.linear(input, weight, bias)
    y_NM: Tensor = _Linear.apply(input.reshape(-1, input.shape[-1]), weight, bias, weights.of(weight))
    return y_NM.view(*input.shape[:-1], len(weight))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, weight_MK: Tensor, bias_M: Tensor | None, rounded: RoundedWeight) -> Tensor:
        ctx.save_for_backward(x_NK)
        ctx.rounded = rounded
        y_NM = rounded.product(x_NK)
        return y_NM if bias_M is None else y_NM.add_(bias_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NM: Tensor) -> tuple[Tensor | None, ...]:
        (x_NK,) = ctx.saved_tensors
        weight_MK, rows = ctx.rounded.backward_MK, len(grad_NM)
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        bias_grad = grad_NM.sum(0) if needs_bias else None
        grad, x = grad_NM, x_NK
        if weight_MK.dtype == torch.bfloat16:
            grad, x = round_rows(grad_NM), round_rows(x_NK) if needs_weight else x_NK
        x_grad = (grad @ weight_MK)[:rows].float() if needs_x else None
        weight_grad = (grad.t() @ x).float() if needs_weight else None
        return x_grad, weight_grad, bias_grad, None

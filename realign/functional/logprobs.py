"""Log-probs and entropy from hidden states, computed in chunks without materializing all logits.

The logits [N, V] of N tokens would be the largest tensor of an update. This module computes them in chunks, reduces
each chunk to one number per token, frees it, and recomputes it in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .head import HeadGradients, LMHead, Projection, no_autocast, wide_dtype

__all__ = ["LMHead", "check_head", "chosen_chunk", "chunk_tokens", "chunks", "token_logprobs"]

MIN_TEMPERATURE = 1e-2
"""Minimum temperature. Below it, scaled logits are numerically meaningless in low precision."""

IMPOSSIBLE = -1e4
"""A log-prob whose exponential is 0 in every precision."""

CHUNK_ELEMENTS_CPU = 2**22
"""Logits per chunk on CPU: 16 MiB in fp32, which fits the last-level cache and is as fast as larger chunks."""
CHUNK_ELEMENTS_ACCELERATOR = 2**26
"""Minimum logits per chunk on an accelerator: 256 MiB in fp32, hundreds of tokens for a vocabulary of 150,000."""
CHUNK_ELEMENTS_LARGEST = 2**28
"""Maximum logits per chunk on an accelerator: 1 GiB in fp32."""
MEMORY_PER_ELEMENT = 320
"""Bytes of device memory for each logit of a chunk: a chunk in fp32 takes 1/80 of the memory. It depends on the size
of the device and not on its free memory, so that equal devices round equally."""


def token_logprobs(
    hidden_NH: Tensor,
    head: LMHead,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute the log-prob of one token per hidden state under softmax(logits / temperature), and the entropy.

    The matrix product runs in the autocast dtype if autocast is enabled, else in the wider dtype of hidden states and
    weight. All other computation is in fp32. Hidden states, weight and bias receive gradients.

    Args:
        hidden_NH: [N, H] hidden states.
        head: LM head with a vocabulary of V tokens.
        targets_N: [N] int64 token ids in [0, V).
        temperature: temperature of the sampler.
        chunk_size: tokens per chunk; None chooses automatically. Affects memory and speed, not values.
        with_entropy: also return the entropy, differentiable.

    Returns:
        Log-probs [N] in nats, and entropies [N] in nats or None; fp32 (fp64 for fp64 input).

    Raises:
        ValueError: shapes do not match, an id is not in the vocabulary, or the temperature is below 0.01.
    """
    check_head(hidden_NH, head, temperature)
    if targets_N.shape != hidden_NH.shape[:1]:
        raise ValueError(f"targets_N has shape {tuple(targets_N.shape)}, should be {tuple(hidden_NH.shape[:1])}")
    _check_targets(targets_N, len(head.weight_VH))
    logprobs_N, entropy_N = _TokenLogprobs.apply(
        hidden_NH,
        head.weight_VH,
        head.bias_V,
        targets_N,
        Projection.of(hidden_NH, head, temperature),
        chosen_chunk(chunk_size, head.weight_VH),
        with_entropy,
    )
    return logprobs_N, entropy_N


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        project: Projection,
        chunk: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        logprobs_N = hidden_NH.new_empty(len(hidden_NH), dtype=wide_dtype(hidden_NH, weight_VH))
        normalizer_N = torch.empty_like(logprobs_N)
        entropy_N = torch.empty_like(logprobs_N) if with_entropy else None
        with no_autocast(hidden_NH):
            matrix_VH = weight_VH.to(project.dtype)
            for rows in chunks(len(hidden_NH), chunk):
                logits_CV = project.logits(hidden_NH[rows], matrix_VH, bias_V)
                top_C = logits_CV.amax(-1)
                logits_CV.sub_(top_C[:, None])
                picked_C = logits_CV.gather(-1, targets_N[rows, None])[:, 0]
                weights_CV = logits_CV.exp() if with_entropy else logits_CV.exp_()
                total_C = weights_CV.sum(-1)
                logprobs_N[rows] = picked_C - total_C.log()
                normalizer_N[rows] = top_C + total_C.log()
                if entropy_N is not None:
                    # skips 0 * -inf of impossible words; a NaN logit is in `total_C`
                    entropy_N[rows] = total_C.log() - weights_CV.mul_(logits_CV).nansum(-1) / total_C
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, normalizer_N, entropy_N)
        ctx.project, ctx.chunk = project, chunk
        ctx.set_materialize_grads(False)  # skips the backward pass of an entropy that is only a metric
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor | None, entropy_grad_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, normalizer_N, entropy_N = ctx.saved_tensors
        if grad_N is None:
            grad_N = torch.zeros_like(normalizer_N)
        grads = HeadGradients(hidden_NH, weight_VH, bias_V, ctx.needs_input_grad)
        with no_autocast(hidden_NH):
            matrix_VH = weight_VH.to(ctx.project.dtype)
            for rows in chunks(len(hidden_NH), ctx.chunk):
                hidden_CH = hidden_NH[rows].to(ctx.project.dtype)
                logits_CV = ctx.project.logits(hidden_CH, matrix_VH, bias_V)
                cap_slope_CV = ctx.project.cap_slope(logits_CV)
                logp_CV = logits_CV.sub_(normalizer_N[rows, None])
                picked_C1 = grad_N[rows, None] * ctx.project.gain
                if entropy_grad_N is None:
                    grad_CV = logp_CV.exp_().mul_(-picked_C1)
                else:
                    logp_CV.clamp_(min=IMPOSSIBLE)  # else 0 * -inf
                    # d logp / d logits = onehot - p and d H / d logits = -p (logp + H), with p factored out.
                    surplus_CV = (logp_CV + entropy_N[rows, None]).mul_(entropy_grad_N[rows, None] * ctx.project.gain)
                    grad_CV = logp_CV.exp_().mul_(surplus_CV.add_(picked_C1).neg_())
                grad_CV.scatter_add_(-1, targets_N[rows, None], picked_C1)
                grads.add(rows, grad_CV, cap_slope_CV, hidden_CH, matrix_VH)
        return *grads.cast(weight_VH, bias_V), None, None, None, None


def check_head(hidden_NH: Tensor, head: LMHead, temperature: float) -> None:
    """Raise ValueError if the temperature is too small, or the shapes do not match."""
    if not temperature >= MIN_TEMPERATURE:
        raise ValueError(f"temperature must be at least {MIN_TEMPERATURE}, found {temperature}")
    if hidden_NH.ndim != 2 or head.weight_VH.ndim != 2 or hidden_NH.shape[1] != head.weight_VH.shape[1]:
        raise ValueError(
            f"hidden states of shape {tuple(hidden_NH.shape)} do not fit a head of shape {tuple(head.weight_VH.shape)}"
        )


def _check_targets(targets_N: Tensor, words: int) -> None:
    if targets_N.device.type != "cpu" or len(targets_N) == 0:
        return  # the accelerator checks bounds itself; a check here would synchronize with the host
    low, high = int(targets_N.min()), int(targets_N.max())
    if low < 0 or high >= words:
        raise ValueError(f"targets_N must be ids in [0, {words}), found {low} to {high}")


def chunk_tokens(words: int, device: torch.device) -> int:
    """Return the default number of tokens in a chunk of logits over `words` tokens of the vocabulary."""
    if device.type == "cpu":
        return max(64, min(2048, CHUNK_ELEMENTS_CPU // max(1, words)))
    elements = CHUNK_ELEMENTS_ACCELERATOR
    if device.type == "cuda" and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(device).total_memory
        elements = max(elements, min(CHUNK_ELEMENTS_LARGEST, total // MEMORY_PER_ELEMENT))
    return max(64, min(8192, elements // max(1, words)))


def chosen_chunk(asked: int | None, weight_VH: Tensor) -> int:
    """Return the tokens per chunk: `asked`, or the default for the vocabulary and the device."""
    if asked is not None:
        if asked < 1:
            raise ValueError(f"chunk_size must be at least 1 token, found {asked}")
        return asked
    return chunk_tokens(len(weight_VH), weight_VH.device)


def chunks(tokens: int, size: int) -> Iterator[slice]:
    """Iterate over the slices of `size` tokens."""
    return (slice(start, start + size) for start in range(0, tokens, size))

"""Exact divergences between two distributions over the whole vocabulary, from hidden states, in chunks.

The logits of both models exist for one chunk of tokens at a time, as in `logprobs`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .head import HeadGradients, LMHead, Projection, no_autocast, wide_dtype
from .logprobs import check_head, chosen_chunk, chunks

__all__ = ["vocabulary_divergence"]


def vocabulary_divergence(
    hidden_NH: Tensor,
    head: LMHead,
    target_hidden_NH: Tensor,
    target_head: LMHead,
    *,
    beta: float = 1.0,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> Tensor:
    """Compute the generalized Jensen-Shannon divergence of the trained policy q and a fixed target p at every token.

    With m = beta p + (1 - beta) q, the divergence is beta KL(p || m) + (1 - beta) KL(q || m) (GKD, arXiv:2306.13649).
    It tends to 0 at both ends, so the ends are defined as the limits of the divergence divided by beta (1 - beta):
    beta = 0 is the forward KL, KL(p || q), and beta = 1 is the reverse KL, KL(q || p).

    Args:
        hidden_NH: [N, H] hidden states of the policy q, differentiable.
        head: LM head of the policy, differentiable, with a vocabulary of V tokens.
        target_hidden_NH: [N, H'] hidden states of the target p, detached.
        target_head: LM head of the target, detached, with the same vocabulary.
        beta: weight of the target in the mixture, in [0, 1].
        temperature: temperature of both distributions.
        chunk_size: tokens per chunk; None chooses automatically. Affects memory and speed, not values.

    Returns:
        [N] in nats; fp32 (fp64 for fp64 input).

    Raises:
        ValueError: shapes do not match, the vocabularies differ in size, `beta` is not in [0, 1], or the temperature
            is below 0.01.
    """
    check_head(hidden_NH, head, temperature)
    check_head(target_hidden_NH, target_head, temperature)
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must be in [0, 1], found {beta}")
    if len(hidden_NH) != len(target_hidden_NH) or len(head.weight_VH) != len(target_head.weight_VH):
        raise ValueError(
            f"policy has {len(hidden_NH)} tokens over {len(head.weight_VH)} words, "
            f"target {len(target_hidden_NH)} over {len(target_head.weight_VH)}. Both must be equal"
        )
    return _VocabularyDivergence.apply(
        hidden_NH,
        head.weight_VH,
        head.bias_V,
        target_hidden_NH.detach(),
        target_head.weight_VH.detach(),
        None if target_head.bias_V is None else target_head.bias_V.detach(),
        Projection.of(hidden_NH, head, temperature),
        Projection.of(target_hidden_NH, target_head, temperature),
        beta,
        chosen_chunk(chunk_size, head.weight_VH),
    )


class _VocabularyDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        target_hidden_NH: Tensor,
        target_weight_VH: Tensor,
        target_bias_V: Tensor | None,
        project: Projection,
        target_project: Projection,
        beta: float,
        chunk: int,
    ) -> Tensor:
        divergence_N = hidden_NH.new_empty(len(hidden_NH), dtype=wide_dtype(hidden_NH, weight_VH))
        with no_autocast(hidden_NH):
            matrix_VH, target_matrix_VH = weight_VH.to(project.dtype), target_weight_VH.to(target_project.dtype)
            for rows in chunks(len(hidden_NH), chunk):
                logq_CV = project.logits(hidden_NH[rows], matrix_VH, bias_V).log_softmax(-1)
                logits_CV = target_project.logits(target_hidden_NH[rows], target_matrix_VH, target_bias_V)
                divergence_N[rows] = _divergence(logq_CV, logits_CV.log_softmax(-1), beta)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, target_hidden_NH, target_weight_VH, target_bias_V)
        ctx.projects, ctx.beta, ctx.chunk = (project, target_project), beta, chunk
        return divergence_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, target_hidden_NH, target_weight_VH, target_bias_V = ctx.saved_tensors
        project, target_project = ctx.projects
        grads = HeadGradients(hidden_NH, weight_VH, bias_V, ctx.needs_input_grad)
        with no_autocast(hidden_NH):
            matrix_VH, target_matrix_VH = weight_VH.to(project.dtype), target_weight_VH.to(target_project.dtype)
            for rows in chunks(len(hidden_NH), ctx.chunk):
                hidden_CH = hidden_NH[rows].to(project.dtype)
                logits_CV = project.logits(hidden_CH, matrix_VH, bias_V)
                cap_slope_CV = project.cap_slope(logits_CV)
                target_CV = target_project.logits(target_hidden_NH[rows], target_matrix_VH, target_bias_V)
                slope_CV = _slope(logits_CV.log_softmax(-1), target_CV.log_softmax(-1), ctx.beta)
                grad_CV = slope_CV.mul_(grad_N[rows, None] * project.gain)
                grads.add(rows, grad_CV, cap_slope_CV, hidden_CH, matrix_VH)
        return *grads.cast(weight_VH, bias_V), None, None, None, None, None, None, None


def _divergence(logq_CV: Tensor, logp_CV: Tensor, beta: float) -> Tensor:
    """Return [C] divergence of a chunk, from the log-probs of the policy q and of the target p."""
    if beta == 0:
        return _kl(logp_CV, logq_CV)
    if beta == 1:
        return _kl(logq_CV, logp_CV)
    logm_CV = _log_mixture(logq_CV, logp_CV, beta)
    return beta * _kl(logp_CV, logm_CV) + (1 - beta) * _kl(logq_CV, logm_CV)


def _kl(logp_CV: Tensor, logq_CV: Tensor) -> Tensor:
    """Return [C] KL(p || q). Words that p excludes add 0, also if q excludes them."""
    p_CV = logp_CV.exp()
    return (logp_CV - logq_CV).mul_(p_CV).masked_fill_(p_CV == 0, 0).sum(-1)


def _slope(logq_CV: Tensor, logp_CV: Tensor, beta: float) -> Tensor:
    """Return [C, V], in new memory: the derivative of `_divergence` with respect to the logits of the policy.

    With g the derivative with respect to the probabilities q, the result is q (g - E_q[g]). For the mixture,
    g = (1 - beta) log(q / m), since the derivatives through m cancel up to a constant.
    """
    q_CV = logq_CV.exp()
    if beta == 0:
        return q_CV.sub_(logp_CV.exp())
    surprise_CV = logq_CV - (logp_CV if beta == 1 else _log_mixture(logq_CV, logp_CV, beta))
    surprise_CV.masked_fill_(q_CV == 0, 0)
    centered_CV = surprise_CV.sub_((q_CV * surprise_CV).sum(-1, keepdim=True))
    return q_CV.mul_(centered_CV if beta == 1 else centered_CV.mul_(1 - beta))


def _log_mixture(logq_CV: Tensor, logp_CV: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(logp_CV + math.log(beta), logq_CV + math.log1p(-beta))

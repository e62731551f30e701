"""Log-probs, entropy and divergences from hidden states, computed in chunks without materializing all logits.

The logits [N, V] of N tokens would be the largest tensor of an update. This module computes them in chunks, reduces
each chunk to one number per token, frees it, and recomputes it in the backward pass. A divergence over the whole
vocabulary has the logits of both models for one chunk at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .packed import at_least_fp32
from .rounding import RoundedWeight, active_rounding, no_rounding, round_rows

__all__ = [
    "HeadGradients",
    "LMHead",
    "Projection",
    "Support",
    "check_head",
    "choose_chunk",
    "chunk_tokens",
    "chunks",
    "no_autocast",
    "token_logprobs",
    "vocabulary_divergence",
    "wide_dtype",
]


_MIN_TEMPERATURE = 1e-2
"""Minimum temperature. Below it, scaled logits are numerically meaningless in low precision."""

_IMPOSSIBLE = -1e4
"""A log-prob whose exponential is 0 in every precision."""

_CHUNK_ELEMENTS_CPU = 2**22
"""Logits per chunk on CPU: 16 MiB in fp32, which fits the last-level cache and is as fast as larger chunks."""

_CHUNK_ELEMENTS_ACCELERATOR = 2**26
"""Minimum logits per chunk on an accelerator: 256 MiB in fp32, hundreds of tokens for a vocabulary of 150,000."""

_CHUNK_ELEMENTS_LARGEST = 2**28
"""Maximum logits per chunk on an accelerator: 1 GiB in fp32."""

_MEMORY_PER_ELEMENT = 320
"""Bytes of device memory for each logit of a chunk: a chunk in fp32 takes 1/80 of the memory. It depends on the size
of the device and not on its free memory, so that equal devices round equally."""


class ExactHead(Protocol):
    """Computes logits and log-probs with sums whose order does not depend on the number of rows."""

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Return the product [N, V] of hidden states with the weight of a head, without gradient."""
        ...

    def logprobs(self, logits_NV: Tensor, tokens_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probs [N] of tokens under the softmax of logits, and the log-sum-exp [N]."""
        ...


@dataclass(frozen=True, eq=False)
class WordShard:
    """The rows of a head that this process has, if several processes divide the vocabulary among them.

    All of them call the functions of this module with the same hidden states and tokens.
    """

    start: int
    """First token of this process."""
    rows: int
    """Number of tokens of each process; the last may have fewer."""
    words: int
    """Number of tokens of all processes together."""
    gather: Callable[[Tensor], Tensor]
    """Returns the tensors [...] of all processes as one tensor [processes, ...]."""
    sum: Callable[[Tensor], Tensor]
    """Returns the sum over all processes."""
    complete: Callable[[Tensor], Tensor]
    """Returns the rows [V, ...] of all processes, given [`rows`, ...] of this one; differentiable."""

    def local(self, targets_N: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Return which tokens are among the `rows` of this process, and the row of each; any row for other tokens."""
        local_N = targets_N - self.start
        return (local_N >= 0) & (local_N < rows), local_N.clamp(0, rows - 1)

    def merge(self, targets_C: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
        """Return the statistics of all logits from those of the logits of this process.

        They are, each [C]: the largest logit; the sum of the weights exp(logit - largest); the logit of the target
        minus the largest. The last one is the sum of weight times (logit - largest).
        """
        top_PC, total_PC, picked_PC, surplus_PC = self.gather(torch.stack(parts)).unbind(1)
        top_C = top_PC.amax(0)
        lower_PC = top_PC - top_C
        scale_PC = lower_PC.exp()
        owner_C = targets_C // self.rows
        return (
            top_C,
            (scale_PC * total_PC).sum(0),
            (picked_PC + lower_PC).gather(0, owner_C[None])[0],
            (scale_PC * (surplus_PC + lower_PC * total_PC)).sum(0),
        )


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
    shard: WordShard | None = None
    """Which rows of the head `weight_VH` and `bias_V` are; None means all."""
    exact: ExactHead | None = None
    """Computes the values of log-probs; None: torch. The head must have a weight only."""
    product: Callable[[Tensor], Tensor] | None = None
    """Multiplies rows by the weight in `logits`; None: torch."""
    ends_backward: bool = False
    """Whether log-probs pass on no gradient if theirs is 0. An accelerator would have to wait for the host."""

    @property
    def words(self) -> int:
        """Number of tokens of the vocabulary."""
        return len(self.weight_VH) if self.shard is None else self.shard.words

    def first(self, words: int) -> LMHead:
        """Return a head restricted to the first `words` tokens of the vocabulary."""
        shard, rows = self.shard, words
        if shard is not None:
            shard, rows = replace(shard, words=min(words, shard.words)), max(0, words - shard.start)
        bias_V = None if self.bias_V is None else self.bias_V[:rows]
        return replace(self, weight_VH=self.weight_VH[:rows], bias_V=bias_V, shard=shard)

    def complete(self) -> LMHead:
        """Return a head with all rows, differentiable; collective if several processes have them."""
        shard = self.shard
        if shard is None:
            return self
        # Processes exchange tensors of equal shape, and the last one may have fewer rows.
        missing = shard.rows - len(self.weight_VH)
        weight_VH = shard.complete(F.pad(self.weight_VH, (0, 0, 0, missing)))[: shard.words]
        bias_V = None if self.bias_V is None else shard.complete(F.pad(self.bias_V, (0, missing)))[: shard.words]
        return replace(self, weight_VH=weight_VH, bias_V=bias_V, shard=None)

    def to(self, device: torch.device | str) -> LMHead:
        """Return the head on a device; without a copy if it is there."""
        bias_V = None if self.bias_V is None else self.bias_V.to(device)
        return replace(self, weight_VH=self.weight_VH.to(device), bias_V=bias_V)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Compute all logits: [N, V] fp32 (fp64 for fp64 input), differentiable. Intended for sampling (small N)."""
        product = self.product if self.exact is None else self.exact.logits
        if product is None:
            project = Projection.of(hidden_NH, self, 1.0)
            product = partial(project.product, weight_VH=project.matrix(self.weight_VH))
        with no_autocast(hidden_NH):
            logits_NV = product(hidden_NH)
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
    rounded: RoundedWeight | None = None
    """Weight with which the product is computed instead, see `rounding`."""

    @classmethod
    def of(cls, hidden_NH: Tensor, head: LMHead, temperature: float) -> Projection:
        """Create the projection of `hidden_NH` by `head`, with the temperature."""
        weights, dtype = active_rounding(), _matmul_dtype(hidden_NH, head.weight_VH)
        rounded = None if weights is None or dtype != torch.float32 else weights.of(head.weight_VH)
        return cls(head.scale, head.softcap, temperature, dtype, rounded)

    def matrix(self, weight_VH: Tensor) -> Tensor:
        """Return the weight for `product`."""
        return weight_VH.to(self.dtype) if self.rounded is None else weight_VH

    def product(self, hidden_CH: Tensor, weight_VH: Tensor) -> Tensor:
        """Return the product [C, V] with the weight, in fp32 or fp64."""
        hidden_CH = hidden_CH.to(self.dtype)
        if self.rounded is not None:
            return self.rounded.product(hidden_CH)
        return at_least_fp32(F.linear(hidden_CH, weight_VH))

    def logits(self, hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
        """Compute logits / temperature of a chunk, in new memory that the caller may overwrite."""
        logits_CV = self.product(hidden_CH, weight_VH)
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


@dataclass(frozen=True, eq=False)
class Support:
    """The tokens that top-k, top-p or min-p kept for N distributions, which are then softmaxes over these tokens only.

    An empty set stands for the whole vocabulary.
    """

    counts_N: Tensor
    """[N] int64, on the host: size of each set."""
    ids_K: Tensor
    """[K] int64, on the device of the logits: the token ids of all sets, one set after the other."""

    def take(self, rows_M: Tensor) -> Support:
        """Return the sets of some rows; `rows_M` is on the host."""
        counts_M = self.counts_N[rows_M]
        starts_M = (self.counts_N.cumsum(0) - self.counts_N)[rows_M]
        places_K = torch.arange(int(counts_M.sum())) + (starts_M - counts_M.cumsum(0) + counts_M).repeat_interleave(
            counts_M
        )
        return Support(counts_M, self.ids_K[places_K.to(self.ids_K.device, non_blocking=True)])

    def restrict(self, logits_CV: Tensor, rows: slice, shard: WordShard | None = None) -> Tensor:
        """Set the logits of all other tokens in a chunk to -inf, in place, and return the chunk.

        Args:
            logits_CV: the chunk.
            rows: its rows.
            shard: the tokens of the logits; None means all.
        """
        counts_C = self.counts_N[rows]
        start = int(self.counts_N[: rows.start].sum())
        ids_K = self.ids_K[start : start + int(counts_C.sum())]
        owners_K = torch.arange(len(counts_C)).repeat_interleave(counts_C).to(ids_K.device, non_blocking=True)
        limited_C1 = (counts_C > 0)[:, None].to(ids_K.device, non_blocking=True)
        excluded_CV = limited_C1.repeat(1, logits_CV.shape[-1])
        if shard is None:
            excluded_CV[owners_K, ids_K] = False
        else:  # a token of another process counts 0 at any place
            own_K, ids_K = shard.local(ids_K, logits_CV.shape[-1])
            kept_CV = torch.zeros_like(excluded_CV, dtype=torch.int32)
            excluded_CV &= kept_CV.index_put_((owners_K, ids_K), own_K.int(), accumulate=True) == 0
        return logits_CV.masked_fill_(excluded_CV, -torch.inf)


class HeadGradients:
    """Accumulates the required gradients of hidden states, weight and bias over chunks."""

    def __init__(
        self,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        needed: tuple[bool, ...],
        rounded: RoundedWeight | None,
    ) -> None:
        self._rounded = rounded
        wide = wide_dtype(hidden_NH, weight_VH)
        # Each row of the hidden states belongs to one chunk, so it is written once. Weight and bias sum over chunks, in
        # fp32: a bf16 sum would drop the small contributions of later chunks.
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
        low_CV = grad_CV = grad_CV.to(weight_VH.dtype)
        if self._rounded is not None:
            weight_VH = self._rounded.backward_MK
        if self._rounded is not None and weight_VH.dtype == torch.bfloat16:
            low_CV = round_rows(grad_CV)
        if self.hidden_NH is not None:
            self.hidden_NH[rows] = (low_CV @ weight_VH)[: len(grad_CV)].to(self.hidden_NH.dtype)
        # addmm_ adds in place, without a temporary [V, H], but needs equal dtypes. For a chunk of a
        # rounded head, the temporary would take longer than the product in fp32.
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
    # Autocast leaves fp64 alone too.
    if wider != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return wider


@contextmanager
def no_autocast(x: Tensor) -> Iterator[None]:
    """Return a context without autocast on the device of `x`, and without `rounding`, for code with explicit dtypes."""
    with torch.autocast(x.device.type, enabled=False), no_rounding():
        yield


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype for everything but the matrix product: fp64 if any tensor is fp64, else fp32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def token_logprobs(
    hidden_NH: Tensor,
    head: LMHead,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    with_entropy: bool = False,
    support: Support | None = None,
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
        support: the tokens over which each distribution is normalized; None: the whole vocabulary.

    Returns:
        Log-probs [N] in nats, and entropies [N] in nats or None; fp32 (fp64 for fp64 input).

    Raises:
        ValueError: shapes do not match, an id is not in the vocabulary, or the temperature is below 0.01.
    """
    check_head(hidden_NH, head, temperature)
    if targets_N.shape != hidden_NH.shape[:1]:
        raise ValueError(f"targets_N has shape {tuple(targets_N.shape)}, should be {tuple(hidden_NH.shape[:1])}")
    _check_targets(targets_N, head.words)
    logprobs_N, entropy_N = _TokenLogprobs.apply(
        hidden_NH,
        head.weight_VH,
        head.bias_V,
        targets_N,
        Projection.of(hidden_NH, head, temperature),
        choose_chunk(chunk_size, head),
        with_entropy,
        support,
        head,
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
        support: Support | None,
        head: LMHead,
    ) -> tuple[Tensor, Tensor | None]:
        shard, exact = head.shard, head.exact
        logprobs_N = hidden_NH.new_empty(len(hidden_NH), dtype=wide_dtype(hidden_NH, weight_VH))
        normalizer_N = torch.empty_like(logprobs_N)
        entropy_N = torch.empty_like(logprobs_N) if with_entropy else None
        with no_autocast(hidden_NH):
            matrix_VH = project.matrix(weight_VH)
            for rows in chunks(len(hidden_NH), chunk):
                if exact is None:
                    logits_CV = project.logits(hidden_NH[rows], matrix_VH, bias_V)
                else:
                    logits_CV = exact.logits(hidden_NH[rows]).mul_(project.gain)
                if support is not None:
                    support.restrict(logits_CV, rows, shard)
                if exact is not None:
                    logprobs_N[rows], normalizer_N[rows] = exact.logprobs(logits_CV, targets_N[rows])
                    if entropy_N is not None:
                        logp_CV = logits_CV.sub_(normalizer_N[rows, None])
                        entropy_N[rows] = -(logp_CV.exp() * logp_CV).nansum(-1)
                    continue
                targets_C, top_C = targets_N[rows], logits_CV.amax(-1)
                if shard is not None:
                    targets_C = shard.local(targets_C, len(matrix_VH))[1]
                    top_C = top_C.clamp(min=torch.finfo(top_C.dtype).min)  # all words of this process may be impossible
                logits_CV.sub_(top_C[:, None])
                # Before the next line, whose exp_ overwrites the logits.
                picked_C = logits_CV.gather(-1, targets_C[:, None])[:, 0]
                weights_CV = logits_CV.exp() if with_entropy else logits_CV.exp_()
                total_C = weights_CV.sum(-1)
                # skips 0 * -inf of impossible words; a NaN logit is in `total_C`
                surplus_C = weights_CV.mul_(logits_CV).nansum(-1) if with_entropy else total_C
                if shard is not None:
                    top_C, total_C, picked_C, surplus_C = shard.merge(
                        targets_N[rows], top_C, total_C, picked_C, surplus_C
                    )
                logprobs_N[rows] = picked_C - total_C.log()
                normalizer_N[rows] = top_C + total_C.log()
                if entropy_N is not None:
                    entropy_N[rows] = total_C.log() - surplus_C / total_C
        # Nothing of size [N, V]: the backward pass recomputes the logits and normalizes them by the stored log-sum-exp.
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, normalizer_N, entropy_N)
        ctx.project, ctx.chunk, ctx.support, ctx.shard = project, chunk, support, shard
        ctx.ends_backward = head.ends_backward
        ctx.set_materialize_grads(False)  # skips the backward pass of an entropy that is only a metric
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor | None, entropy_grad_N: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.ends_backward and not any(x is not None and bool(x.any()) for x in (grad_N, entropy_grad_N)):
            return (None,) * 9
        hidden_NH, weight_VH, bias_V, targets_N, normalizer_N, entropy_N = ctx.saved_tensors
        # Only the entropy is in the loss; see `set_materialize_grads`.
        if grad_N is None:
            grad_N = torch.zeros_like(normalizer_N)
        grads = HeadGradients(hidden_NH, weight_VH, bias_V, ctx.needs_input_grad, ctx.project.rounded)
        with no_autocast(hidden_NH):
            matrix_VH = ctx.project.matrix(weight_VH)
            for rows in chunks(len(hidden_NH), ctx.chunk):
                hidden_CH = hidden_NH[rows].to(ctx.project.dtype)
                logits_CV = ctx.project.logits(hidden_CH, matrix_VH, bias_V)
                cap_slope_CV = ctx.project.cap_slope(logits_CV)
                if ctx.support is not None:
                    ctx.support.restrict(logits_CV, rows, ctx.shard)
                logp_CV = logits_CV.sub_(normalizer_N[rows, None])
                picked_C1 = grad_N[rows, None] * ctx.project.gain
                if entropy_grad_N is None:
                    grad_CV = logp_CV.exp_().mul_(-picked_C1)
                else:
                    logp_CV.clamp_(min=_IMPOSSIBLE)  # else 0 * -inf
                    # d logp / d logits = onehot - p and d H / d logits = -p (logp + H), with p factored out.
                    surplus_CV = (logp_CV + entropy_N[rows, None]).mul_(entropy_grad_N[rows, None] * ctx.project.gain)
                    grad_CV = logp_CV.exp_().mul_(surplus_CV.add_(picked_C1).neg_())
                targets_C = targets_N[rows]
                if ctx.shard is not None:
                    own_C, targets_C = ctx.shard.local(targets_C, len(matrix_VH))
                    picked_C1 = picked_C1 * own_C[:, None]
                grad_CV.scatter_add_(-1, targets_C[:, None], picked_C1)
                grads.add(rows, grad_CV, cap_slope_CV, hidden_CH, matrix_VH)
        if ctx.shard is not None and grads.hidden_NH is not None:
            grads.hidden_NH = ctx.shard.sum(grads.hidden_NH)
        return *grads.cast(weight_VH, bias_V), *(None,) * 6


def check_head(hidden_NH: Tensor, head: LMHead, temperature: float) -> None:
    """Raise ValueError if the temperature is too small, or the shapes do not match."""
    if not temperature >= _MIN_TEMPERATURE:
        raise ValueError(f"temperature must be at least {_MIN_TEMPERATURE}, found {temperature}")
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
        return max(64, min(2048, _CHUNK_ELEMENTS_CPU // max(1, words)))
    elements = _CHUNK_ELEMENTS_ACCELERATOR
    if device.type == "cuda" and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(device).total_memory
        elements = max(elements, min(_CHUNK_ELEMENTS_LARGEST, total // _MEMORY_PER_ELEMENT))
    return max(64, min(8192, elements // max(1, words)))


def choose_chunk(asked: int | None, head: LMHead) -> int:
    """Return the tokens per chunk: `asked`, or the default for the vocabulary and the device."""
    if asked is not None:
        if asked < 1:
            raise ValueError(f"chunk_size must be at least 1 token, found {asked}")
        return asked
    rows = len(head.weight_VH) if head.shard is None else head.shard.rows  # the same for all processes
    return chunk_tokens(rows, head.weight_VH.device)


def chunks(tokens: int, size: int) -> Iterator[slice]:
    """Iterate over the slices of `size` tokens."""
    return (slice(start, start + size) for start in range(0, tokens, size))


def vocabulary_divergence(
    hidden_NH: Tensor,
    head: LMHead,
    target_hidden_NH: Tensor,
    target_head: LMHead,
    *,
    beta: float = 1.0,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    support: Support | None = None,
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
        support: the tokens over which both distributions are normalized; None: the whole vocabulary.

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
        choose_chunk(chunk_size, head),
        support,
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
        support: Support | None,
    ) -> Tensor:
        divergence_N = hidden_NH.new_empty(len(hidden_NH), dtype=wide_dtype(hidden_NH, weight_VH))
        with no_autocast(hidden_NH):
            matrix_VH, target_matrix_VH = project.matrix(weight_VH), target_project.matrix(target_weight_VH)
            for rows in chunks(len(hidden_NH), chunk):
                logits_CV = project.logits(hidden_NH[rows], matrix_VH, bias_V)
                target_CV = target_project.logits(target_hidden_NH[rows], target_matrix_VH, target_bias_V)
                if support is not None:
                    support.restrict(logits_CV, rows)
                    support.restrict(target_CV, rows)
                divergence_N[rows] = _divergence(logits_CV.log_softmax(-1), target_CV.log_softmax(-1), beta)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, target_hidden_NH, target_weight_VH, target_bias_V)
        ctx.projects, ctx.beta, ctx.chunk, ctx.support = (project, target_project), beta, chunk, support
        return divergence_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, target_hidden_NH, target_weight_VH, target_bias_V = ctx.saved_tensors
        project, target_project = ctx.projects
        grads = HeadGradients(hidden_NH, weight_VH, bias_V, ctx.needs_input_grad, project.rounded)
        with no_autocast(hidden_NH):
            matrix_VH, target_matrix_VH = project.matrix(weight_VH), target_project.matrix(target_weight_VH)
            for rows in chunks(len(hidden_NH), ctx.chunk):
                hidden_CH = hidden_NH[rows].to(project.dtype)
                logits_CV = project.logits(hidden_CH, matrix_VH, bias_V)
                cap_slope_CV = project.cap_slope(logits_CV)
                target_CV = target_project.logits(target_hidden_NH[rows], target_matrix_VH, target_bias_V)
                if ctx.support is not None:
                    ctx.support.restrict(logits_CV, rows)
                    ctx.support.restrict(target_CV, rows)
                slope_CV = _slope(logits_CV.log_softmax(-1), target_CV.log_softmax(-1), ctx.beta)
                grad_CV = slope_CV.mul_(grad_N[rows, None] * project.gain)
                grads.add(rows, grad_CV, cap_slope_CV, hidden_CH, matrix_VH)
        return *grads.cast(weight_VH, bias_V), None, None, None, None, None, None, None, None


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
    # A word that the policy excludes has a surprise of -inf or NaN, which q = 0 would not remove.
    surprise_CV.masked_fill_(q_CV == 0, 0)
    centered_CV = surprise_CV.sub_((q_CV * surprise_CV).sum(-1, keepdim=True))
    return q_CV.mul_(centered_CV if beta == 1 else centered_CV.mul_(1 - beta))


def _log_mixture(logq_CV: Tensor, logp_CV: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(logp_CV + math.log(beta), logq_CV + math.log1p(-beta))

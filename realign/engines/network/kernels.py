"""Kernels for packed causal attention: selection of a kernel for a layer, and one function per kernel.

Shapes: T packed tokens, L tokens of one sequence, Hq query heads, Hk key-value heads, D head size.
"""

from __future__ import annotations

import inspect
from enum import StrEnum
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from realign.errors import ConfigError


class Backend(StrEnum):
    """Which kernel computes packed attention; `auto` selects the fastest kernel that supports the layer."""

    auto = "auto"
    sdpa = "sdpa"
    flash = "flash"
    varlen = "varlen"


class AttentionArgs(NamedTuple):
    """Attention settings of a layer, except which tokens attend to each other."""

    scaling: float
    """Factor that multiplies the scores q k^T first."""
    dropout: float
    """Dropout probability of attention weights; 0 outside training."""
    sliding_window: int | None
    """Number of keys that a query attends to, including its own; None means all previous keys and its own."""
    softcap: float | None
    """Replaces scores x by softcap * tanh(x / softcap); None disables it."""
    sinks_H: Tensor | None
    """[Hq] attention sinks (gpt_oss): one extra score per head in the softmax, without a value; None for no sinks."""


def choose_backend(backend: Backend, q: Tensor, v: Tensor, args: AttentionArgs) -> Backend:
    """Return the kernel for a layer: `backend`, or with `auto` the fastest kernel that supports the layer.

    Raises:
        ConfigError: the backend does not support the layer. The message names the backend and the reason.
    """
    if backend is Backend.auto:
        able = (b for b in (Backend.flash, Backend.varlen) if _obstacle(b, q, v, args) is None)
        return next(able, Backend.sdpa)
    if (why := _obstacle(backend, q, v, args)) is not None:
        raise ConfigError(f"attention={backend.value}: this backend {why}. Set attention=auto or sdpa.")
    return backend


def _obstacle(backend: Backend, q: Tensor, v: Tensor, args: AttentionArgs) -> str | None:
    """Return why the kernel cannot compute this layer, or None if it can."""
    if backend is Backend.sdpa:
        return None
    if q.device.type != "cuda":
        return f"needs a CUDA device, but the model is on {q.device.type}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"supports float16 and bfloat16, but the model computes in {str(q.dtype).removeprefix('torch.')}"
    if q.shape[-1] != v.shape[-1] or q.shape[-1] > 256 or q.shape[-1] % 8:
        return f"does not support heads of size {q.shape[-1]} with values of size {v.shape[-1]}"
    if args.sinks_H is not None:
        return "does not support attention sinks"
    if backend is Backend.flash:
        return None if find_spec("flash_attn") else "needs flash-attn (pip install 'realign-rl[flash-attn]')"
    accepted = _varlen_parameters()
    if accepted is None:
        return "needs a version of torch with torch.nn.attention.varlen"
    if args.softcap is not None or args.dropout:
        return "supports neither soft caps nor dropout"
    if args.sliding_window is not None and "window_size" not in accepted:
        return "does not support sliding windows in this version of torch"
    return None


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, mask: Tensor) -> Tensor:
    """Compute attention of one sequence with plain operators, for soft caps and sinks. Returns [1, Hq, L, D].

    `mask` is added to the scores: 0 where a query attends to a key, else -inf.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * args.scaling
    if args.softcap is not None:
        scores = args.softcap * torch.tanh(scores / args.softcap)
    scores = scores.float() + mask
    if args.sinks_H is None:
        weights = scores.softmax(-1)
    else:
        sinks = args.sinks_H.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return F.dropout(weights.to(v.dtype), args.dropout) @ v


def flash_attention(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, cu_seqlens: Tensor, longest: int) -> Tensor:
    """Run the kernel of the flash-attn package. q [1, Hq, T, D], k, v [1, Hk, T, D]; returns [1, T, Hq, D]."""
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    out: Tensor = flash_attn_varlen_func(
        *(x[0].transpose(0, 1) for x in (q, k, v)),
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        dropout_p=args.dropout,
        softmax_scale=args.scaling,
        causal=True,
        window_size=(-1, -1) if args.sliding_window is None else (args.sliding_window - 1, 0),
        softcap=args.softcap or 0.0,
    )
    return out[None]


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, cu_seqlens: Tensor, longest: int) -> Tensor:
    """Run the kernel of torch; apply scaling and GQA before the call if this torch version lacks the keywords."""
    from torch.nn.attention.varlen import varlen_attn

    accepted = _varlen_parameters() or frozenset()
    keywords: dict[str, Any] = {}
    if "window_size" in accepted:
        keywords["window_size"] = (-1 if args.sliding_window is None else args.sliding_window - 1, 0)
    else:
        keywords["is_causal"] = True
    if "scale" in accepted:
        keywords["scale"] = args.scaling
    else:
        q = q * (args.scaling * q.shape[-1] ** 0.5)
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in accepted:
            keywords["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **keywords)
    assert isinstance(out, Tensor)
    return out[None]


def _varlen_parameters() -> frozenset[str] | None:
    """Return the keywords of `torch.nn.attention.varlen.varlen_attn`, or None if torch lacks this function."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return frozenset(inspect.signature(varlen_attn).parameters)

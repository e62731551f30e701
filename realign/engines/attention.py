"""The one attention function of realign: registered with transformers, told what to do by the caller's context.

A model loaded with `attn_implementation=ATTENTION` calls `_dispatch` in every layer. The keyword `realign_context` of
the model call reaches it, and says how tokens see each other: packed sequences here, prefill and decoding in
`generation`.
Importing this module registers the name in transformers' own table; no model class or instance is patched.

Shapes: T packed tokens, Hq query heads, Hk key-value heads, D size of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from realign.functional.packed import position_ids

ATTENTION = "realign"
CONTEXT = "realign_context"

# Keywords of a model call that reach the attention function and do not change what it computes.
_HARMLESS = frozenset({"position_ids", "cache_position", "use_cache", "is_causal", "logits_to_keep", "return_dict"})


class Backend(StrEnum):
    """Which kernel computes packed attention; `auto` takes the fastest one that computes the same."""

    auto = "auto"
    sdpa = "sdpa"
    flash = "flash"
    varlen = "varlen"


class AttentionArgs(NamedTuple):
    """What a layer's attention computes, apart from who sees whom."""

    scaling: float
    """Factor of the scores, before anything else."""
    dropout: float
    """Probability of dropping an attention weight; 0 outside training."""
    sliding_window: int | None
    """Keys that a query sees, itself included; None means all before it."""
    softcap: float | None
    """Scores x become softcap * tanh(x / softcap)."""
    sinks_H: Tensor | None
    """[Hq] a score per head that takes part in the softmax and has no value (gpt_oss)."""


class AttentionContext(Protocol):
    """Who sees whom in one call of a model."""

    def attend(self, layer: int, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
        """Attend from q [1, Hq, T, D] to k, v [1, Hk, T, D] of layer `layer`; return [1, T, Hq, D]."""
        ...


def packed_inputs(input_ids_T: Tensor, cu_seqlens: Tensor) -> dict[str, Any]:
    """Keywords with which a transformers model reads packed sequences; add `realign_context=PackedContext(...)`."""
    return {
        "input_ids": input_ids_T[None],
        "position_ids": position_ids(cu_seqlens)[None],
        "attention_mask": None,
        "use_cache": False,
    }


@dataclass(eq=False)
class PackedContext:
    """Causal attention inside each packed sequence, and none between them.

    Attributes:
        cu_seqlens: int32 [S + 1] boundaries with a leading 0, on the device of the model.
        backend: the kernel; `auto` is resolved for each call by device, dtype and what the layer asks for.
        lengths: lengths of the sequences on the host; None reads them from `cu_seqlens` (on CUDA: one host sync).
    """

    cu_seqlens: Tensor
    backend: Backend = Backend.auto
    lengths: Sequence[int] | None = None
    _windows: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def _lengths(self) -> list[int]:
        return self.cu_seqlens.diff().tolist() if self.lengths is None else [int(n) for n in self.lengths]

    @cached_property
    def _longest(self) -> int:
        return max(self._lengths, default=0)

    def attend(self, layer: int, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
        """See `AttentionContext.attend`.

        Raises:
            ValueError: the backend that was asked for cannot compute this layer.
        """
        match choose_backend(Backend(self.backend), q, v, args):
            case Backend.flash:
                return _flash(q, k, v, args, self.cu_seqlens, self._longest)
            case Backend.varlen:
                return _varlen(q, k, v, args, self.cu_seqlens, self._longest)
            case _:
                return self._loop(q, k, v, args)

    def _loop(self, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
        n = self._lengths
        parts = zip(q.split(n, 2), k.split(n, 2), v.split(n, 2), strict=True)
        out = [self._one(a, b, c, args).transpose(1, 2) for a, b, c in parts if a.shape[2]]
        return torch.cat(out, 1) if out else q.new_empty(1, 0, q.shape[1], v.shape[-1])

    def _one(self, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
        length = q.shape[2]
        window = args.sliding_window if args.sliding_window is not None and args.sliding_window < length else None
        if args.softcap is not None or args.sinks_H is not None:
            return _explicit(q, k, v, args, self._visible(length, window or length, q.device))
        mask = None if window is None else self._visible(length, window, q.device)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=args.dropout,
            scale=args.scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )

    def _visible(self, length: int, window: int, device: torch.device) -> Tensor:
        """[length, length] bool: which keys each query sees; kept, since every layer asks for the same ones."""
        if (length, window) not in self._windows:
            causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
            self._windows[length, window] = causal.triu(1 - window)
        return self._windows[length, window]


def choose_backend(backend: Backend, q: Tensor, v: Tensor, args: AttentionArgs) -> Backend:
    """The kernel for a layer: `backend` itself, or under `auto` the fastest that can compute the layer.

    Raises:
        ValueError: names the backend and why it cannot compute the layer.
    """
    if backend is Backend.auto:
        able = (b for b in (Backend.flash, Backend.varlen) if _obstacle(b, q, v, args) is None)
        return next(able, Backend.sdpa)
    if (why := _obstacle(backend, q, v, args)) is not None:
        raise ValueError(f"attention backend {backend.value!r} {why}; use attention=auto or sdpa")
    return backend


def _obstacle(backend: Backend, q: Tensor, v: Tensor, args: AttentionArgs) -> str | None:
    """Why the kernel cannot compute this layer, or None."""
    if backend is Backend.sdpa:
        return None
    if q.device.type != "cuda":
        return f"needs a CUDA device, the model is on {q.device.type}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"computes in float16 and bfloat16 only, found {str(q.dtype).removeprefix('torch.')}"
    if q.shape[-1] != v.shape[-1] or q.shape[-1] > 256 or q.shape[-1] % 8:
        return f"cannot compute heads of size {q.shape[-1]} with values of size {v.shape[-1]}"
    if args.sinks_H is not None:
        return "has no attention sinks"
    if backend is Backend.flash:
        return None if find_spec("flash_attn") else "needs the package flash-attn (the extra `realign[flash-attn]`)"
    accepted = _varlen_parameters()
    if accepted is None:
        return "needs a torch that has torch.nn.attention.varlen"
    if args.softcap is not None or args.dropout:
        return "has neither soft caps nor dropout"
    if args.sliding_window is not None and "window_size" not in accepted:
        return "has no sliding window in this version of torch"
    return None


def _explicit(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, visible: Tensor) -> Tensor:
    """Attention of one sequence written out, for what no fused kernel has: soft caps and sinks. [1, Hq, L, D]."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * args.scaling
    if args.softcap is not None:
        scores = args.softcap * torch.tanh(scores / args.softcap)
    scores = scores.float().masked_fill(~visible, -torch.inf)
    if args.sinks_H is None:
        weights = scores.softmax(-1)
    else:
        sinks = args.sinks_H.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return F.dropout(weights.to(v.dtype), args.dropout) @ v


def _flash(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, cu_seqlens: Tensor, longest: int) -> Tensor:
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


def _varlen(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, cu_seqlens: Tensor, longest: int) -> Tensor:
    """The kernel of torch itself. Its keywords grew from version to version: what one lacks is done before the call."""
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
    out = varlen_attn(
        *(x[0].transpose(0, 1).contiguous() for x in (q, k, v)), cu_seqlens, cu_seqlens, longest, longest, **keywords
    )
    assert isinstance(out, Tensor)
    return out[None]


def _varlen_parameters() -> frozenset[str] | None:
    """Keywords of `torch.nn.attention.varlen.varlen_attn`; None where torch has no such function."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return frozenset(inspect.signature(varlen_attn).parameters)


def _dispatch(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    realign_context: AttentionContext | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The registered function: refuse what would change the result unseen, and hand on the rest to the context."""
    if realign_context is None:
        raise ValueError(
            f"{_family(module)} was called without {CONTEXT}=..., which says how its tokens see each other"
        )
    _refuse_unknown(module, attention_mask, sliding_window, others)
    if torch.is_autocast_enabled(query.device.type):  # query and key may be fp32 where a norm follows the projection
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    args = AttentionArgs(float(scale), float(dropout), sliding_window, softcap, s_aux)
    layer: Any = getattr(module, "layer_idx", None)
    if layer is None:
        raise ValueError(f"{_family(module)}: attention layers do not know their index (layer_idx)")
    return realign_context.attend(int(layer), module, query, key, value, args), None


def _refuse_unknown(module: nn.Module, mask: Tensor | None, window: int | None, others: dict[str, Any]) -> None:
    if mask is not None:
        raise ValueError(
            f"{_family(module)} gives its attention a mask of shape {list(mask.shape)}; packed text has none"
        )
    if getattr(module, "is_causal", True) is False or others.get("is_causal") is False:
        raise ValueError(f"{_family(module)} has attention that is not causal")
    for name, x in others.items():
        if name not in _HARMLESS and x is not None and x is not False:
            raise ValueError(f"{_family(module)} gives its attention {name!r}, which realign does not know")
    config: Any = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    kind = types[module.layer_idx] if types else None
    # A family that expresses locality by its mask alone would lose it here, since a registered function gets no mask.
    if kind not in (None, "full_attention", "attention", "sliding_attention") or (
        kind == "sliding_attention" and window is None
    ):
        raise ValueError(f"{_family(module)} has layers of type {kind!r} whose window does not reach the attention")


def _family(module: nn.Module) -> str:
    config: Any = getattr(module, "config", None)
    return f"model family {getattr(config, 'model_type', type(module).__name__)!r}"


AttentionInterface.register(ATTENTION, _dispatch)

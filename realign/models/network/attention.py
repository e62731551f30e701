"""The attention function that realign registers with transformers.

A model loaded with `attn_implementation=ATTENTION` calls `_dispatch` in every layer. The caller passes the keyword
`realign_context` to the model. This context determines which tokens attend to each other: packed sequences in this
module, prefill and decoding in `realign.models.network.kv_cache`. Importing this module registers the name with
transformers. No model class or instance is patched.

Shapes: T packed tokens, Hq query heads, Hk key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from realign.api.sample import on_device
from realign.errors import ConfigError
from realign.functional.packed import cu_seqlens_of, position_ids
from realign.models.network.kernels import (
    CONTEXT,
    AttentionArgs,
    Backend,
    Packing,
    choose_backend,
    explicit_attention,
    packed_attention,
)
from realign.models.network.passes import Layout
from realign.models.network.recurrence import RowsForward, run_sequences

ATTENTION = "realign"

# Keywords of a model call that reach the attention function and do not change its result.
_HARMLESS = frozenset({"position_ids", "cache_position", "use_cache", "is_causal", "logits_to_keep", "return_dict"})


class NotPackableError(ConfigError):
    """A model family that gives other results packed than alone. Its models can run unpacked."""


class AttentionContext(Protocol):
    """Which tokens attend to each other in one call of a model."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
        """Attend from q [1, Hq, T, D] to k, v [1, Hk, T, D] of layer `layer`; return [1, T, Hq, D]."""
        ...


def packed_inputs(input_ids_T: Tensor, cu_seqlens: Tensor, positions_T: Tensor | None = None) -> dict[str, Any]:
    """Return the keywords to run a transformers model on packed sequences, except `realign_context`.

    Args:
        input_ids_T: the tokens.
        cu_seqlens: sequence boundaries; on the host, computing positions needs no device sync.
        positions_T: position of each token in its sequence, if sequences do not start at 0; may be on the host.
    """
    positions_T = position_ids(cu_seqlens) if positions_T is None else positions_T
    return {
        "input_ids": input_ids_T[None],
        "position_ids": on_device(positions_T, input_ids_T.device)[None],
        # `realign_context` says which tokens attend to each other
        "attention_mask": None,
        "use_cache": False,
    }


def layout_inputs(input_ids_T: Tensor, layout: Layout, backend: Backend) -> dict[str, Any]:
    """Return the keywords, including `realign_context`, to run a transformers model on this process's rows of a layout.

    The context is that of all rows. Tensors on the host are copied to the device of the tokens without a sync.
    """
    device = input_ids_T.device
    ids_R = input_ids_T if layout.token_R is None else input_ids_T[on_device(layout.token_R, device)]
    cu_seqlens = layout.cu_seqlens
    after = None if layout.token_R is None else layout.after.tolist()
    device_cu_seqlens = on_device(cu_seqlens, ids_R.device)
    context = PackedContext(device_cu_seqlens, backend, layout.pieces.tolist(), after)
    own = packed_inputs(layout.of_own(ids_R), cu_seqlens, layout.of_own(layout.position_R))
    return {**own, CONTEXT: context}


@dataclass(eq=False)
class PackedContext:
    """Causal attention within each packed sequence, with no attention across sequences.

    Attributes:
        cu_seqlens: int32 [S + 1] boundaries with a leading 0, on the device of the model.
        backend: the kernel; `auto` is resolved for each call from the device, the dtype and the layer's arguments.
        lengths: lengths of the sequences on the host; None reads them from `cu_seqlens` (on CUDA: one host sync).
        after: for each sequence, the index of an earlier one that it continues, or -1. It attends to that one too, and
            to those which that one continues. None means that no sequence continues another.
    """

    cu_seqlens: Tensor
    backend: Backend = Backend.auto
    lengths: Sequence[int] | None = None
    after: Sequence[int] | None = None
    _masks: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def _lengths(self) -> list[int]:
        return self.cu_seqlens.diff().tolist() if self.lengths is None else [int(n) for n in self.lengths]

    @cached_property
    def _longest(self) -> int:
        return max(self._lengths, default=0)

    @cached_property
    def _pieces(self) -> list[list[int]]:
        """For each sequence, those that it continues, from the first on, and itself."""
        pieces: list[list[int]] = []
        for i, before in enumerate([-1] * len(self._lengths) if self.after is None else self.after):
            pieces.append([i] if before < 0 else [*pieces[before], i])
        return pieces

    @cached_property
    def _spans(self) -> list[int]:
        """Number of tokens of each sequence and those that it continues."""
        return [sum(self._lengths[i] for i in pieces) for pieces in self._pieces]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
        """See `AttentionContext.attend`.

        Raises:
            ConfigError: the requested backend cannot compute this layer.
        """
        backend = choose_backend(Backend(self.backend), q, v, args)
        if backend is Backend.sdpa:
            return self._loop(q, k, v, args)  # joins the keys of one sequence at a time, without a copy of all
        return packed_attention(backend, q, self._expand(k), self._expand(v), args, self._packing)

    @cached_property
    def _continues(self) -> bool:
        return any(len(pieces) > 1 for pieces in self._pieces)

    @cached_property
    def _packing(self) -> Packing:
        """Boundaries for kernels: the keys of a sequence that continues another follow those of the other."""
        if not self._continues:
            return Packing(self.cu_seqlens, self._longest, self.cu_seqlens, self._longest)
        cu_keys = on_device(cu_seqlens_of(self._spans), self.cu_seqlens.device)
        return Packing(self.cu_seqlens, self._longest, cu_keys, max(self._spans))

    @cached_property
    def _key_tokens(self) -> Tensor:
        """Packed tokens whose keys each sequence reads, sequence after sequence."""
        starts = np.cumsum([0, *self._lengths])
        tokens = [np.arange(starts[i], starts[i + 1]) for pieces in self._pieces for i in pieces]
        return on_device(torch.from_numpy(np.concatenate(tokens)), self.cu_seqlens.device)

    def _expand(self, x: Tensor) -> Tensor:
        """Return the keys or values [1, Hk, K, D] in the order of `_packing`.

        The gradient of a shared key is summed in fp32, since many sequences may share it.
        """
        if not self._continues:
            return x
        # the backward pass of `index_select` adds in the dtype of its input, so the keys are widened before it
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.to(wide).index_select(2, self._key_tokens).to(x.dtype)

    def recur(self, layer: int, forward: RowsForward, hidden_TH: Tensor) -> Tensor:
        """See `RecurrentContext.recur`. A sequence that continues another runs after a copy of it."""
        return self._own_rows(run_sequences(forward, self._texts(hidden_TH)))

    def _texts(self, hidden_TH: Tensor) -> list[Tensor]:
        """Return the rows of each sequence, after those that it continues."""
        return self._join(hidden_TH.split(self._lengths), 0)

    def _own_rows(self, texts: Sequence[Tensor]) -> Tensor:
        """Return the rows of all sequences, the inverse of `_texts`."""
        return torch.cat([x[len(x) - n :] for x, n in zip(texts, self._lengths, strict=True)])

    def _join(self, x_of_each: Sequence[Tensor], dim: int) -> list[Tensor]:
        """Join the tensor of each sequence to those of the sequences that it continues."""
        return [x_of_each[p[0]] if len(p) == 1 else torch.cat([x_of_each[i] for i in p], dim) for p in self._pieces]

    def _loop(self, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
        n = self._lengths
        queries, keys, values = q.split(n, 2), self._join(k.split(n, 2), 2), self._join(v.split(n, 2), 2)
        out = [
            self._one(q_own, k_seen, v_seen, args).transpose(1, 2)
            for q_own, k_seen, v_seen in zip(queries, keys, values, strict=True)
            if q_own.shape[2]  # a sequence that ends within the shared prefix has an empty piece of its own
        ]
        return torch.cat(out, 1) if out else q.new_empty(1, 0, q.shape[1], v.shape[-1])

    def _one(self, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
        """Attend within one sequence; the queries are its last tokens."""
        length = k.shape[2]
        # a window that covers the whole sequence hides nothing, and a mask would keep sdpa from its flash kernel
        window = args.sliding_window if args.sliding_window is not None and args.sliding_window < length else None
        if args.softcap is not None or args.sinks_H is not None:
            return explicit_attention(q, k, v, args, self._mask(q, length, window))
        # `is_causal` aligns the first query with the first key, which is wrong after keys of another piece
        mask = None if window is None and q.shape[2] == length else self._mask(q, length, window)
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

    def _mask(self, q: Tensor, length: int, window: int | None) -> Tensor:
        """Return the mask [queries, length]: 0 where a query attends to a key, else -inf.

        It is a view of one mask for all sequences and layers, so autograd saves no copies of it.
        """
        # additive instead of bool, since `explicit_attention` adds it to the scores
        key = (window or 0, q.dtype)
        if key not in self._masks:
            span = max(self._spans)
            ones = torch.ones(span, span, dtype=torch.bool, device=q.device).tril()
            hidden = ~ones.triu(1 - (window or span))
            self._masks[key] = q.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        return self._masks[key][length - q.shape[2] : length, :length]


def use_attention(model: Any, name: str) -> None:
    """Switch a transformers model to another attention implementation.

    `set_attn_implementation` only logs a warning for families with separate attention code (bloom). Their masks depend
    on the config nevertheless.

    Raises:
        ValueError: the family lacks this implementation.
    """
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        model.config._attn_implementation = name


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
    """Reject arguments that would silently change the result, and call `attend` of the context."""
    if realign_context is None:
        raise ValueError(
            f"{_family(module)} was called without {CONTEXT}=..., which defines which tokens attend to each other"
        )
    _check_arguments(module, attention_mask, sliding_window, others)
    if torch.is_autocast_enabled(query.device.type):  # query and key may be fp32 if a norm follows the projection
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling  # the default of transformers
    args = AttentionArgs(float(scale), float(dropout), sliding_window, softcap, s_aux)
    layer: Any = getattr(module, "layer_idx", None)
    if layer is None:
        raise NotPackableError(f"{_family(module)} cannot run packed: its attention layers have no layer_idx")
    return realign_context.attend(int(layer), query, key, value, args), None


def _check_arguments(module: nn.Module, mask: Tensor | None, window: int | None, others: dict[str, Any]) -> None:
    if mask is not None:
        raise NotPackableError(
            f"{_family(module)} cannot run packed: it passes a mask of shape {list(mask.shape)} to its attention"
        )
    if getattr(module, "is_causal", True) is False or others.get("is_causal") is False:
        raise NotPackableError(f"{_family(module)} cannot run packed: its attention is not causal")
    for name, x in others.items():
        if name not in _HARMLESS and x is not None and x is not False:
            what = f"{_family(module)} cannot run packed"
            raise NotPackableError(f"{what}: it passes an unknown {name!r} to its attention")
    config: Any = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    kind = types[module.layer_idx] if types else None
    # A registered function receives no mask, so a family that implements its window only by the mask would lose it.
    if kind not in (None, "full_attention", "attention", "hybrid", "sliding_attention") or (
        kind == "sliding_attention" and window is None
    ):
        raise NotPackableError(f"{_family(module)} cannot run packed: its layers of type {kind!r} pass no window")


def _family(module: nn.Module) -> str:
    config: Any = getattr(module, "config", None)
    return f"model family {getattr(config, 'model_type', type(module).__name__)!r}"


AttentionInterface.register(ATTENTION, _dispatch)


def exclude_attention_from_compilation() -> None:
    """Keep `torch.compile` from tracing attention. Calls of compiled layers leave the graph for it.

    This is not the default, since the wrapper imports the compiler of torch.
    """
    AttentionInterface.register(ATTENTION, torch.compiler.disable(_dispatch))

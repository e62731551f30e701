"""`CompiledTrunk`: a `FusedTrunk` whose decode steps run in the library of `decode_step.cpp`.

A decode step with few rows takes about 120 operators of torch, whose overhead exceeds their computation. The library
computes the whole step in one call.

Shapes: B rows being decoded, H hidden size.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from realign.functional.packed import cu_seqlens_of, position_ids
from realign.functional.rounding import MultiplyBy
from realign.models.network.attention import AttentionContext
from realign.models.network.kv_cache import DecodeContext, KeyValues, KVCache, PrefillContext
from realign.samplers.in_process.compiled.fused_layers import FusedLayer, FusedTrunk, gelu_tanh
from realign.samplers.in_process.compiled.library import LibraryError, load_library

_LARGE_PRODUCT = 2**27
"""Multiply-adds of a matrix product per thread from which torch is faster (measured on one core with MKL)."""

_TILES = 32
"""Inputs and outputs of which tiles store a multiple, the rest as zeros: `DEEP` and `WIDE` of decode_step.cpp."""

_PANEL = 64
"""Outputs of which panels store a multiple, the rest as zeros: `PANEL` of decode_step.cpp."""

_TEXT_ROWS = 256
"""Rows of a text in one call, which limits the scratch memory."""

_PROBE_ROWS = 7
"""Rows of the compared step: more than `HEIGHT` of decode_step.cpp, so that it also computes a smaller tile."""

PROBE_LENGTH = 40
"""Largest number of tokens of a compared row: several vectors of `LANES` scores, and usually an incomplete one."""


class Form(IntEnum):
    """How the library stores a weight; `Stored` of decode_step.cpp."""

    floats = 0
    """In fp32, by panels of outputs."""
    halves = 1
    """In bf16, by panels of outputs."""
    tiles = 2
    """In bf16, as AMX multiplies it."""

    @classmethod
    def of_rounded(cls, library: ctypes.CDLL) -> Form:
        """Return the fastest form of weights that are exact in bf16, on this CPU."""
        return cls.tiles if library.realign_has_tiles() else cls.halves


@dataclass(frozen=True, eq=False)
class StoredLinear:
    """Linear layer whose products run in the library."""

    values: Tensor
    """The weight as the library reads it."""
    form: Form
    shape: tuple[int, int]
    """Outputs M and inputs K."""
    library: ctypes.CDLL
    bias: Tensor | None = None
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, library: ctypes.CDLL, form: Form, weight_MK: Tensor, bias: Tensor | None = None) -> StoredLinear:
        """Return the layer with the current values of a weight; a form in bf16 rounds them."""
        weight_MK = weight_MK.detach().float()
        outputs, inputs = weight_MK.shape
        multiples = (_TILES, _TILES) if form is Form.tiles else (_PANEL, 1)
        size = math.prod(-(-n // multiple) * multiple for n, multiple in zip(weight_MK.shape, multiples, strict=True))
        make = torch.empty if size == weight_MK.numel() else torch.zeros
        values = make(size, dtype=torch.float32 if form is Form.floats else torch.bfloat16)
        place = weight_MK.data_ptr(), *weight_MK.stride(), inputs, outputs
        library.realign_store(*place, values.data_ptr(), form, torch.get_num_threads())
        return cls(values, form, (outputs, inputs), library, bias)

    def product(self, x_NK: Tensor, threads: int) -> Tensor:
        """Return the product [N, M] of rows with the weight, whose columns the threads divide."""
        outputs, inputs = self.shape
        x_NK, y_NM = x_NK.detach().contiguous(), torch.empty(len(x_NK), outputs)
        pointers = x_NK.data_ptr(), self.values.data_ptr()
        self.library.realign_product(len(x_NK), *pointers, inputs, outputs, y_NM.data_ptr(), self.form, threads)
        return y_NM

    def __call__(self, x: Tensor) -> Tensor:
        """See `AnyLinear`."""
        y_NM = self.product(x.reshape(-1, x.shape[-1]), torch.get_num_threads())
        return (y_NM if self.bias is None else y_NM.add_(self.bias)).view(*x.shape[:-1], self.shape[0])

    def add_to(self, x: Tensor, h: Tensor) -> Tensor:
        """See `AnyLinear`."""
        return x.add_(self(h))


def multiplies_faster(library: ctypes.CDLL) -> bool:
    """Return whether the library multiplies by weights in bf16 faster than torch does in fp32, for any rows."""
    return bool(library.realign_has_tiles() or library.realign_has_wider_vectors())


def library_products() -> MultiplyBy | None:
    """Return what multiplies by a weight in bf16; None if this CPU or this process can't do it faster than torch."""
    library = load_library()
    if isinstance(library, LibraryError) or not multiplies_faster(library):
        return None
    return partial(StoredLinear.of, library, Form.of_rounded(library))


class _Layer(ctypes.Structure):
    """`Layer` of decode_step.cpp; ctypes checks neither order nor types of the fields."""

    _fields_ = (
        *((name, c_void_p) for name in ("attention_norm", "qkv", "qkv_bias", "qk_norm", "output", "output_bias")),
        *((name, c_void_p) for name in ("mlp_norm", "gate_up", "gate_up_bias", "down", "down_bias", "keys", "values")),
        *((name, c_void_p) for name in ("added_by_attention_norm", "added_by_mlp_norm", "turns")),
        *((name, c_int64) for name in ("queries", "groups", "window", "inner", "gelu")),
        *((name, c_float) for name in ("attention_floor", "qk_floor", "mlp_floor", "scaling")),
        *((name, c_float) for name in ("added_by_attention_floor", "added_by_mlp_floor")),
    )


class _Trunk(ctypes.Structure):
    """`Trunk` of decode_step.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("layers", "embedding", "norm")),
        *((name, c_int64) for name in ("n_layers", "hidden", "head_size", "cache_length", "stored")),
        *((name, c_float) for name in ("floor", "scale")),
    )


class CompiledTrunk:
    """A `Trunk` with the weights of a `FusedTrunk`. Prefill runs the fused trunk, and decode steps run the library.

    With `stores_all`, the library also multiplies in prefill, and torch needs no weights of the layers. The fused trunk
    must have passed `check_supported`.
    """

    def __init__(self, fused: FusedTrunk, library: ctypes.CDLL) -> None:
        self.fused = fused
        self.library = library
        self._hidden = fused.embedding.shape[1]
        linears = [_linears(layer) for layer in fused.layers]
        matrices = [math.prod(x.shape) for four in linears for x in four]
        self._mean_weights = sum(matrices) / len(matrices)
        # kept, since the library has only pointers
        self._embedding, self._turns = fused.embedding.contiguous(), torch.view_as_real(fused.turns).contiguous()
        form = Form.of_rounded(library) if fused.rounded else Form.floats
        if form is Form.tiles and any(layer.down.shape[1] % _TILES for layer in fused.layers):
            form = Form.halves  # a tile would have columns of the gate and of what it multiplies
        self.store = partial(StoredLinear.of, library, form)
        """Returns a linear layer as this trunk has it."""
        self._linears = [
            [x if isinstance(x, StoredLinear) else self.store(x.weight, x.bias) for x in four] for four in linears
        ]
        self.stores_all = fused.rounded and multiplies_faster(library)
        """Whether prefill runs the library's products too, so that no other copy of the weights is needed."""
        if self.stores_all:
            layers = [
                layer._replace(qkv=qkv, output=output, gate_up=gate_up, down=down)
                for layer, (qkv, output, gate_up, down) in zip(fused.layers, self._linears, strict=True)
            ]
            self.fused = replace(fused, layers=layers)
        self._numbered = list(enumerate(self.fused.layers))
        made = [
            _layer(layer, four, self._turns[layer.rotation].data_ptr())
            for layer, four in zip(fused.layers, self._linears, strict=True)
        ]
        self._layers = (_Layer * len(made))(*made)
        self._trunk = _Trunk(
            ctypes.addressof(self._layers),
            self._embedding.data_ptr(),
            fused.norm.weight.data_ptr(),
            len(fused.layers),
            self._hidden,
            2 * fused.turns.shape[-1],
            0,
            form,
            float(fused.norm.floor),
            fused.scale,
        )
        self._address = ctypes.addressof(self._trunk)
        self._scratch = torch.empty(0)

    def __call__(self, ids_N: Tensor, positions_N: Tensor, context: AttentionContext) -> Tensor:
        """See `Trunk`."""
        threads = torch.get_num_threads()
        if isinstance(context, DecodeContext) and self.computes(len(ids_N), threads):
            return self.decode(ids_N, positions_N, context.cache, threads)
        return self.fused(ids_N, positions_N, context)

    def computes(self, rows: int, threads: int) -> bool:
        """Return whether the library computes a decode step; torch computes those for which it is faster."""
        return self.stores_all or rows * self._mean_weights <= threads * _LARGE_PRODUCT

    def decode(self, ids_B: Tensor, positions_B: Tensor, cache: KVCache, threads: int = 1) -> Tensor:
        """Return the last hidden states [B, H] of one token per row, and write its keys and values to the cache.

        The result does not depend on `threads`, and a row's result does not depend on the other rows.

        Args:
            ids_B: token ids, in the order of the slots.
            positions_B: positions of the tokens; earlier positions of each slot have keys and values.
            cache: KV cache of the rows.
            threads: number of threads that divide the columns of the products.
        """
        self._use(cache)
        ids_B, positions_B = ids_B.contiguous(), positions_B.contiguous()
        x_BH = torch.empty(len(ids_B), self._hidden)
        floats = self.library.realign_scratch(self._address, len(ids_B), threads)
        if len(self._scratch) < floats:
            self._scratch = torch.empty(floats)
        self.library.realign_decode(
            self._address,
            len(ids_B),
            0,
            1,
            ids_B.data_ptr(),
            positions_B.data_ptr(),
            x_BH.data_ptr(),
            self._scratch.data_ptr(),
            threads,
        )
        return x_BH

    def texts(self, ids_R: Tensor, pieces: Sequence[int], after: Sequence[int]) -> tuple[Tensor, KeyValues]:
        """Return the last hidden states [R, H] of whole texts, and the keys and values of the last piece.

        A row's result is that of a decode step, bit for bit. Thread-safe.

        Args:
            ids_R: token ids.
            pieces: number of rows of each piece.
            after: index of the earlier piece that a piece continues, or -1. Pieces that no other continues may stand
                between them.
        """
        before: list[int] = []
        for a in after:
            before.append(0 if a < 0 else before[a] + pieces[a])
        length = max((n + b for n, b in zip(pieces, before, strict=True)), default=0)
        size = 2 * self.fused.turns.shape[-1]
        kv = {i: tuple(torch.empty(2, layer.heads[1], length, size) for _ in range(2)) for i, layer in self._numbered}
        # copies, since other threads have other keys and values
        layers, trunk = type(self._layers).from_buffer_copy(self._layers), _Trunk.from_buffer_copy(self._trunk)
        for i, (keys, values) in kv.items():
            layers[i].keys, layers[i].values = keys.data_ptr(), values.data_ptr()
        trunk.layers, trunk.cache_length = ctypes.addressof(layers), length
        rows = min(max(pieces, default=0), _TEXT_ROWS)
        scratch = torch.empty(self.library.realign_scratch(ctypes.addressof(trunk), rows, 1))
        ids_R, x_RH = ids_R.contiguous(), torch.empty(len(ids_R), self._hidden)
        positions = torch.arange(length)
        continued, first, slot = set(after), 0, 0
        for piece, (count, shared) in enumerate(zip(pieces, before, strict=True)):
            slot = 0 if piece in continued else 1
            for cache in (x for pair in kv.values() for x in pair):
                cache[1, :, :shared] = cache[0, :, :shared]
            for start in range(0, count, rows):
                self.library.realign_decode(
                    ctypes.addressof(trunk),
                    min(rows, count - start),
                    slot,
                    0,
                    ids_R[first + start :].data_ptr(),
                    positions[shared + start :].data_ptr(),
                    x_RH[first + start :].data_ptr(),
                    scratch.data_ptr(),
                    1,
                )
            first += count
        return x_RH, {i: (keys[slot], values[slot]) for i, (keys, values) in kv.items()}

    def difference(self, fused: FusedTrunk) -> float:
        """Return the largest difference from a fused trunk in a decode step, relative to the largest hidden state.

        The rows continue random tokens whose keys and values that trunk computed. Arbitrary keys and values would
        lead a trained model to hidden states that no text produces, where it amplifies rounding a hundredfold.
        """
        generator = torch.Generator().manual_seed(0)
        words, length = len(fused.embedding), PROBE_LENGTH
        positions_B = torch.randint(length, (_PROBE_ROWS,), generator=generator)
        ids_B = torch.randint(words, (_PROBE_ROWS,), generator=generator)
        before = positions_B.clamp(min=1).tolist()  # a prefill of no tokens is not supported
        cu_seqlens = cu_seqlens_of(before)
        context = PrefillContext(cu_seqlens, lengths=before)
        fused(torch.randint(words, (sum(before),), generator=generator), position_ids(cu_seqlens), context)
        rows = list(context.per_sequence())
        cache = KVCache(rows[0], _PROBE_ROWS, length)
        for row, kv in enumerate(rows):
            cache.fill(row, row + 1, kv)
        want_BH = fused(ids_B, positions_B, DecodeContext(cache, positions_B, length - 1))
        got_BH = self.decode(ids_B, positions_B, cache)
        return float((got_BH - want_BH).abs().max() / want_BH.abs().max())

    def _use(self, cache: KVCache) -> None:
        """Point the layers to the tensors of the cache. They are not kept, since `Stream.free_cache` frees them."""
        self._trunk.cache_length = cache.length
        for i, layer in enumerate(self._layers):
            keys, values = cache[i]
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()


def check_supported(fused: FusedTrunk) -> None:
    """Check that the library implements every part of a trunk.

    Raises:
        ValueError: a part is not implemented; the message names it.
    """
    if fused.embedding.device.type != "cpu":
        raise ValueError(f"the model is on {fused.embedding.device.type}")
    if any(layer.qkv.dtype != torch.float32 for layer in fused.layers):
        raise ValueError("matrix products are not in float32")
    for layer in fused.layers:
        if layer.activation not in (F.silu, gelu_tanh):
            raise ValueError("the activation function is neither SiLU nor GELU with tanh")
        if layer.args.softcap is not None or layer.args.sinks_H is not None:
            raise ValueError("attention has a softcap or sinks")


def _linears(layer: FusedLayer) -> list[Any]:
    return [layer.qkv, layer.output, layer.gate_up, layer.down]


def _layer(layer: FusedLayer, linears: Sequence[StoredLinear], turns: int) -> _Layer:
    norm, added = layer.qk_norm, layer.added_norms or (None, None)
    qkv, output, gate_up, down = ((x.values.data_ptr(), None if x.bias is None else x.bias.data_ptr()) for x in linears)
    return _Layer(
        layer.attention_norm.weight.data_ptr(),
        *qkv,
        None if norm is None else norm.weight.data_ptr(),
        *output,
        layer.mlp_norm.weight.data_ptr(),
        *gate_up,
        *down,
        None,
        None,
        *(None if x is None else x.weight.data_ptr() for x in added),
        turns,
        *layer.heads,
        layer.args.sliding_window or 0,
        layer.gate_up.shape[0] // 2,
        layer.activation is gelu_tanh,
        float(layer.attention_norm.floor),
        0.0 if norm is None else float(norm.floor),
        float(layer.mlp_norm.floor),
        layer.args.scaling,
        *(0.0 if x is None else float(x.floor) for x in added),
    )

"""`CompiledTrunk`: a `FusedTrunk` whose decode steps run in the library of `decode_step.cpp`.

A decode step with few rows takes about 120 operators of torch, whose overhead exceeds their computation. The library
computes the whole step in one call.

Shapes: B rows being decoded, H hidden size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from realign.functional.logprobs import LMHead, Projection
from realign.functional.packed import cu_seqlens_of, position_ids
from realign.models.network.attention import AttentionContext
from realign.models.network.kv_cache import DecodeContext, KeyValues, KVCache, PrefillContext
from realign.samplers.in_process.compiled.fused_layers import FusedLayer, FusedTrunk, Linear

_ROWS_PER_THREAD = 8
"""Minimum number of rows per thread. With fewer rows, torch divides each matrix product among the threads instead.

This is an estimate that was not measured."""

_LARGE_PRODUCT = 2**27
"""Multiply-adds of a matrix product per thread from which torch is faster (measured on one core with MKL)."""

_COLUMNS = 64
"""Columns of which each thread gets a multiple: a block of `tile` in decode_step.cpp, or several."""

_TEXT_ROWS = 256
"""Rows of a text in one call, which limits the scratch memory."""

_PROBE_ROWS = 7
"""Rows of the compared step: more than `HEIGHT` of decode_step.cpp, so that it also computes a smaller tile."""

_PROBE_LENGTH = 40
"""Largest number of tokens of a compared row: several vectors of `LANES` scores, and usually an incomplete one."""


class _Layer(ctypes.Structure):
    """`Layer` of decode_step.cpp; ctypes checks neither order nor types of the fields."""

    _fields_ = (
        *((name, c_void_p) for name in ("attention_norm", "qkv", "qkv_bias", "qk_norm", "output", "output_bias")),
        *((name, c_void_p) for name in ("mlp_norm", "gate_up", "gate_up_bias", "down", "down_bias", "keys", "values")),
        *((name, c_int64) for name in ("queries", "groups", "window", "inner")),
        *((name, c_float) for name in ("attention_floor", "qk_floor", "mlp_floor", "scaling")),
    )


class _Trunk(ctypes.Structure):
    """`Trunk` of decode_step.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("layers", "embedding", "turns", "norm")),
        *((name, c_int64) for name in ("n_layers", "hidden", "head_size", "cache_length", "half")),
        ("floor", c_float),
    )


class CompiledTrunk:
    """A `Trunk` with the weights of a `FusedTrunk`. Prefill runs the fused trunk, and decode steps run the library.

    The fused trunk must have passed `check_supported`.
    """

    def __init__(self, fused: FusedTrunk, library: ctypes.CDLL) -> None:
        self.fused = fused
        self._library = library
        self._hidden = fused.embedding.shape[1]
        matrices = [x.weight.numel() for layer in fused.layers for x in _linears(layer)]
        self._mean_weights = sum(matrices) / len(matrices)
        # kept, since the library has only pointers
        self._embedding, self._turns = fused.embedding.contiguous(), torch.view_as_real(fused.turns).contiguous()
        self._numbered = list(enumerate(fused.layers))
        stored = [tuple(_stored(x, fused.rounded) for x in _linears(layer)) for layer in fused.layers]
        self._stored = stored
        self._layers = (_Layer * len(fused.layers))(*map(_layer, fused.layers, stored))
        self._trunk = _Trunk(
            ctypes.addressof(self._layers),
            self._embedding.data_ptr(),
            self._turns.data_ptr(),
            fused.norm.weight.data_ptr(),
            len(fused.layers),
            self._hidden,
            2 * fused.turns.shape[-1],
            0,
            fused.rounded,
            float(fused.norm.floor),
        )
        self._address = ctypes.addressof(self._trunk)
        self._scratch = torch.empty(0)
        self._threads: ThreadPoolExecutor | None = None

    def __call__(self, ids_N: Tensor, positions_N: Tensor, context: AttentionContext) -> Tensor:
        """See `Trunk`."""
        threads = torch.get_num_threads()
        if self.fused.rounded:  # half of the bytes, for which one thread is faster than torch
            threads = max(1, min(threads, len(ids_N) // _ROWS_PER_THREAD))
        if isinstance(context, DecodeContext) and self.computes(len(ids_N), threads):
            return self.decode(ids_N, positions_N, context.cache, threads)
        return self.fused(ids_N, positions_N, context)

    def computes(self, rows: int, threads: int) -> bool:
        """Return whether the library computes a decode step; torch computes those for which it is faster."""
        enough = threads == 1 or rows >= threads * _ROWS_PER_THREAD
        return enough and rows * self._mean_weights <= threads * _LARGE_PRODUCT

    def decode(self, ids_B: Tensor, positions_B: Tensor, cache: KVCache, threads: int = 1) -> Tensor:
        """Return the last hidden states [B, H] of one token per row, and write its keys and values to the cache.

        The result does not depend on `threads`, and a row's result does not depend on the other rows.

        Args:
            ids_B: token ids, in the order of the slots.
            positions_B: positions of the tokens; earlier positions of each slot have keys and values.
            cache: KV cache of the rows.
            threads: number of threads that divide the rows.
        """
        self._use(cache)
        ids_B, positions_B = ids_B.contiguous(), positions_B.contiguous()
        x_BH = torch.empty(len(ids_B), self._hidden)
        ends = [len(ids_B) * i // threads for i in range(threads + 1)]
        per_row = self._library.realign_row_scratch(self._address)
        per_call = self._library.realign_call_scratch(self._address)
        # each thread has a part of its own: the scratch memory of its rows, and of one call
        if len(self._scratch) < len(ids_B) * per_row + threads * per_call:
            self._scratch = torch.empty(len(ids_B) * per_row + threads * per_call)

        def run(part: int) -> None:
            first, last = ends[part], ends[part + 1]
            self._library.realign_decode(
                self._address,
                last - first,
                first,
                1,
                ids_B[first:].data_ptr(),
                positions_B[first:].data_ptr(),
                x_BH[first:].data_ptr(),
                self._scratch[first * per_row + part * per_call :].data_ptr(),
            )

        if threads == 1:
            run(0)
        else:  # threads of Python suffice, since a call by ctypes releases the interpreter lock
            list(self._pool(threads).map(run, range(threads)))
        return x_BH

    def product(self, x_NK: Tensor, stored_KM: Tensor) -> Tensor:
        """Return the product [N, M] with a weight stored in bf16, whose columns the threads of torch divide."""
        x_NK, (inputs, columns) = x_NK.contiguous(), stored_KM.shape
        y_NM = torch.empty(len(x_NK), columns)
        threads = torch.get_num_threads()
        ends = [columns * i // threads // _COLUMNS * _COLUMNS for i in range(threads)] + [columns]

        def run(part: int) -> None:
            first, last = ends[part], ends[part + 1]
            weight, out = stored_KM[:, first:].data_ptr(), y_NM[:, first:].data_ptr()
            self._library.realign_product(len(x_NK), x_NK.data_ptr(), weight, inputs, last - first, out, columns, 1)

        if threads == 1:
            run(0)
        else:
            list(self._pool(threads).map(run, range(threads)))
        return y_NM

    def texts(self, ids_R: Tensor, pieces: Sequence[int], after: Sequence[int]) -> tuple[Tensor, KeyValues]:
        """Return the last hidden states [R, H] of whole texts, and the keys and values of the last piece.

        A row's result is that of a decode step, bit for bit. Thread-safe.

        Args:
            ids_R: token ids.
            pieces: number of rows of each piece.
            after: index of the piece that a piece continues, directly or as the last one before it; or -1.
        """
        before = [0 if a < 0 else pieces[a] for a in after]
        length = max((n + b for n, b in zip(pieces, before, strict=True)), default=0)
        size = 2 * self.fused.turns.shape[-1]
        kv = {i: tuple(torch.empty(2, layer.heads[1], length, size) for _ in range(2)) for i, layer in self._numbered}
        # copies, since other threads have other keys and values
        layers, trunk = type(self._layers).from_buffer_copy(self._layers), _Trunk.from_buffer_copy(self._trunk)
        for i, (keys, values) in kv.items():
            layers[i].keys, layers[i].values = keys.data_ptr(), values.data_ptr()
        trunk.layers, trunk.cache_length = ctypes.addressof(layers), length
        rows = min(max(pieces, default=0), _TEXT_ROWS)
        floats = rows * self._library.realign_row_scratch(self._address)
        scratch = torch.empty(floats + self._library.realign_call_scratch(ctypes.addressof(trunk)))
        ids_R, x_RH = ids_R.contiguous(), torch.empty(len(ids_R), self._hidden)
        positions = torch.arange(length)
        continued, first, slot = set(after), 0, 0
        for piece, (count, shared) in enumerate(zip(pieces, before, strict=True)):
            slot = 0 if piece in continued else 1
            for cache in (x for pair in kv.values() for x in pair):
                cache[1, :, :shared] = cache[0, :, :shared]
            for start in range(0, count, rows):
                self._library.realign_decode(
                    ctypes.addressof(trunk),
                    min(rows, count - start),
                    slot,
                    0,
                    ids_R[first + start :].data_ptr(),
                    positions[shared + start :].data_ptr(),
                    x_RH[first + start :].data_ptr(),
                    scratch.data_ptr(),
                )
            first += count
        return x_RH, {i: (keys[slot], values[slot]) for i, (keys, values) in kv.items()}

    def difference(self) -> float:
        """Return the largest difference from the fused trunk in a decode step, relative to the largest hidden state.

        The rows continue random tokens whose keys and values the fused trunk computed. Arbitrary keys and values would
        lead a trained model to hidden states that no text produces, where it amplifies rounding a hundredfold.
        """
        generator = torch.Generator().manual_seed(0)
        words, length = len(self.fused.embedding), min(len(self.fused.turns), _PROBE_LENGTH)
        positions_B = torch.randint(length, (_PROBE_ROWS,), generator=generator)
        ids_B = torch.randint(words, (_PROBE_ROWS,), generator=generator)
        before = positions_B.clamp(min=1).tolist()  # a prefill of no tokens is not supported
        cu_seqlens = cu_seqlens_of(before)
        context = PrefillContext(cu_seqlens, lengths=before)
        self.fused(torch.randint(words, (sum(before),), generator=generator), position_ids(cu_seqlens), context)
        rows = list(context.per_sequence(before))
        cache = KVCache(rows[0], _PROBE_ROWS, length)
        for row, kv in enumerate(rows):
            cache.fill(row, row + 1, kv)
        want_BH = self.fused(ids_B, positions_B, DecodeContext(cache, positions_B, length - 1))
        got_BH = self.decode(ids_B, positions_B, cache)
        return float((got_BH - want_BH).abs().max() / want_BH.abs().max())

    def _pool(self, threads: int) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        return self._threads

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
    if any(layer.qkv.weight.dtype != torch.float32 for layer in fused.layers):
        raise ValueError("matrix products are not in float32")
    for layer in fused.layers:
        if layer.activation is not F.silu:
            raise ValueError("the activation function is not SiLU")
        if layer.args.softcap is not None or layer.args.sinks_H is not None:
            raise ValueError("attention has a softcap or sinks")
        queries, keys, values = layer.heads
        if queries % keys or keys != values:
            raise ValueError("query heads are not a multiple of the key heads")


def _linears(layer: FusedLayer) -> tuple[Linear, ...]:
    return layer.qkv, layer.output, layer.gate_up, layer.down


def _stored(linear: Linear, rounded: bool) -> Tensor:
    """Return the weight as [inputs, outputs], in bf16 if it is rounded. `for_few_rows` has stored it like this."""
    assert linear.weight.t().is_contiguous()
    assert linear.bias is None or linear.bias.is_contiguous()
    return linear.weight.t().to(torch.bfloat16) if rounded else linear.weight.t()


def _layer(layer: FusedLayer, stored: tuple[Tensor, ...]) -> _Layer:
    norm = layer.qk_norm
    qkv, output, gate_up, down = (
        (weight.data_ptr(), None if linear.bias is None else linear.bias.data_ptr())
        for weight, linear in zip(stored, _linears(layer), strict=True)
    )
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
        layer.heads[0],
        layer.heads[1],
        layer.args.sliding_window or 0,
        len(layer.gate_up.weight) // 2,
        float(layer.attention_norm.floor),
        0.0 if norm is None else float(norm.floor),
        float(layer.mlp_norm.floor),
        layer.args.scaling,
    )


@dataclass(frozen=True, eq=False)
class CompiledHead(LMHead):
    """A head for sampling whose product runs in the library, with the weight stored in bf16."""

    product: Callable[[Tensor], Tensor] | None = None
    """Returns the product of hidden states with the weight."""

    @classmethod
    def of(cls, head: LMHead, trunk: CompiledTrunk) -> CompiledHead:
        """Return the head with the current values of its weight, rounded to bf16."""
        stored_HV = head.weight_VH.detach().to(torch.bfloat16).t().contiguous()
        return cls(**vars(head), product=partial(trunk.product, stored_KM=stored_HV))

    @override
    def _product(self, hidden_NH: Tensor, project: Projection) -> Tensor:
        assert self.product is not None
        return self.product(hidden_NH)

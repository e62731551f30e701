"""Keys and values kept during generation, and the two attention contexts that write and read them.

Shapes: B rows being decoded (one per slot, from slot 0 without gaps), Hq query heads, Hk key-value heads, D size of a
head, P tokens of a prompt. Every layer may have its own Hk and D.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realign.engines.network.attention import ATTENTION, AttentionArgs, PackedContext

KeyValues: TypeAlias = Mapping[int, tuple[Tensor, Tensor]]
"""By layer: keys [Hk, P, D] and values [Hk, P, Dv] of one prompt."""

BUCKET = 32
"""The part of the cache that is read grows by this many tokens at a time, so that few shapes occur."""


@dataclass(eq=False)
class PrefillContext(PackedContext):
    """Packed attention that keeps each layer's keys and values."""

    _seen: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)

    def attend(self, layer: int, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
        """See `AttentionContext.attend`."""
        self._seen[layer] = (k[0], v[0])
        return super().attend(layer, module, q, k, v, args)

    def per_sequence(self, lengths: Sequence[int]) -> Iterator[KeyValues]:
        """What was kept, cut into the packed sequences: views, so they hold the memory of the whole pack.

        Raises:
            ValueError: the model did not use this context.
        """
        if not self._seen:
            raise ValueError(f"generation needs a model loaded with attn_implementation={ATTENTION!r}")
        parts = {layer: (k.split(lengths, 1), v.split(lengths, 1)) for layer, (k, v) in self._seen.items()}
        for i in range(len(lengths)):
            yield {layer: (ks[i], vs[i]) for layer, (ks, vs) in parts.items()}


class KVCache:
    """A static cache of `slots` rows of `length` tokens, shaped like the keys and values of a first prompt.

    Memory is taken when it is first used, as the responses grow: few of them may ever reach the full length.
    """

    def __init__(self, like: KeyValues, slots: int, length: int) -> None:
        self.slots = slots
        self.length = length
        self._layers = {layer: (_empty(k, slots, length), _empty(v, slots, length)) for layer, (k, v) in like.items()}
        self._ready = 0
        self._clean = slots  # so many of the first ones hold zeros, or tokens, in all that is ready
        self._rows: dict[int, Tensor] = {}
        self._part = (0, 0)
        self._views: dict[int, tuple[Tensor, Tensor]] = {}

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys [slots, Hk, length, D] and values [slots, Hk, length, Dv] of a layer."""
        return self._layers[layer]

    def reach(self, length: int, slots: int | None = None) -> int:
        """Make ready what is read of rows of `length` tokens, and return how many tokens that is.

        It is filled with zeros, since what a mask hides is still multiplied by 0, and 0 * NaN is NaN. `slots` limits
        this to the first ones, if it is likely that the others will not be used again.
        """
        reached = min(self.length, -(-length // BUCKET) * BUCKET)
        if reached > self._ready:
            self._clear(slice(0, slots), slice(self._ready, reached))
            self._ready = reached
            self._clean = min(self._clean, self.slots if slots is None else slots)
        return reached

    def _clear(self, slots: slice, tokens: slice) -> None:
        for kv in self._layers.values():
            for cache in kv:
                cache[slots, :, tokens] = 0

    def fill(self, first: int, last: int, prompt: KeyValues) -> None:
        """Copy a prompt to the start of the slots `first` up to but not including `last`."""
        if last > self._clean:
            self._clear(slice(self._clean, None), slice(0, self._ready))
            self._clean = self.slots
        for layer, kv in prompt.items():
            self.reach(kv[0].shape[1])
            for cache, x in zip(self._layers[layer], kv, strict=True):
                cache[first:last, :, : x.shape[1]] = x

    def resize(self, slots: int, length: int) -> None:
        """Make room for more slots, or longer ones: what they hold stays."""
        old = self._layers
        self.slots, self.length = slots, length
        self._layers = {i: (_empty(k[0], slots, length), _empty(v[0], slots, length)) for i, (k, v) in old.items()}
        for layer, kv in old.items():
            for cache, x in zip(self._layers[layer], kv, strict=True):
                cache[: self._clean, :, : self._ready] = x[: self._clean, :, : self._ready]
        self._rows, self._part, self._views = {}, (0, 0), {}

    def move(self, source_M: Tensor, target_M: Tensor, length: int) -> None:
        """Copy the first `length` tokens of the slots `source_M` to the slots `target_M`."""
        for kv in self._layers.values():
            for cache in kv:
                cache[target_M, :, :length] = cache[source_M, :, :length]

    def read(self, layer: int, slots: int, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` keys and values of the first `slots` slots; the views are kept for the next step."""
        if self._part != (slots, length):
            self._part = (slots, length)
            self._views = {i: (k[:slots, :, :length], v[:slots, :, :length]) for i, (k, v) in self._layers.items()}
        return self._views[layer]

    def rows(self, heads: int) -> Tensor:
        """[slots, heads] where the first token of each head is in a layer seen as [slots * heads * length, D]."""
        if heads not in self._rows:
            device = next(iter(self._layers.values()))[0].device
            self._rows[heads] = torch.arange(self.slots * heads, device=device).view(-1, heads) * self.length
        return self._rows[heads]


def bytes_per_slot(like: KeyValues, length: int) -> int:
    """Memory of one slot of `length` tokens."""
    return sum(x.shape[0] * length * x.shape[2] * x.element_size() for kv in like.values() for x in kv)


class DecodeContext:
    """Attention of one new token in each of B rows to its own slot of the cache, for one step.

    The new key and value are written first. Indices and masks are made once per step, and shared by all layers that
    have the same number of heads and the same window.
    """

    def __init__(self, cache: KVCache, positions_B: Tensor, longest: int) -> None:
        """Positions at which the B new tokens stand; `longest` is the largest, given so that no device is asked."""
        self._cache = cache
        self._positions_B = positions_B
        self._length = cache.reach(longest + 1)
        self._index: dict[int, Tensor] = {}
        self._masks: dict[tuple[int | None, int, torch.dtype], Tensor] = {}

    def attend(self, layer: int, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
        """From q [1, Hq, B, D] and the new k, v [1, Hk, B, D] of a layer; returns [1, B, Hq, Dv]."""
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return self.attend_rows(layer, q, k, v, args)[None]

    def attend_rows(self, layer: int, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
        """The same from q [B, Hq, D] and k, v [B, Hk, D]; returns [B, Hq, Dv]."""
        rows, heads = k.shape[:2]
        index = self._write_index(heads)
        for cache, x in zip(self._cache[layer], (k, v), strict=True):
            cache.view(-1, cache.shape[-1]).index_copy_(0, index, x.reshape(-1, x.shape[-1]))
        queries = q.reshape(rows, heads, -1, q.shape[-1])
        mask = self._mask(args.sliding_window, heads, q.dtype)
        out = _attend(queries, *self._cache.read(layer, rows, self._length), mask, args)
        return out.reshape(rows, q.shape[1], -1)

    def _write_index(self, heads: int) -> Tensor:
        """[B * Hk] where the new tokens go in a layer's cache seen as [slots * Hk * length, D]."""
        if heads not in self._index:
            first = self._cache.rows(heads)[: len(self._positions_B)]
            self._index[heads] = (first + self._positions_B[:, None]).flatten()
        return self._index[heads]

    def _mask(self, window: int | None, heads: int, dtype: torch.dtype) -> Tensor:
        """[B, Hk, 1, length] 0 where a row's new token sees, -inf elsewhere."""
        key = (window if window is not None and window < self._length else None, heads, dtype)
        if key not in self._masks:
            at = torch.arange(self._length, device=self._positions_B.device)
            last = self._positions_B[:, None, None, None]
            hidden = at > last if key[0] is None else (at > last) | (at <= last - key[0])
            self._masks[key] = torch.where(hidden.expand(-1, heads, -1, -1), -torch.inf, 0.0).to(dtype)
        return self._masks[key]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, args: AttentionArgs) -> Tensor:
    """Q [B, Hk, Hq / Hk, D] to k, v [B, Hk, length, D]: the query heads that share keys stand as if they were tokens.

    In fp32 on a CPU two batched products are up to three times faster than the fused kernel at these shapes; in half
    precision only the fused kernel keeps the scores in fp32.
    """
    plain = args.softcap is None and args.sinks_H is None
    if plain and (q.device.type != "cpu" or q.dtype not in (torch.float32, torch.float64)):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=args.scaling)
    return _written_out(q, k, v, mask, args)


def _written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, args: AttentionArgs) -> Tensor:
    rows, heads, group, _ = q.shape
    flat_q, flat_k, flat_v, flat_mask = (x.flatten(0, 1) for x in (q, k, v, mask))
    if args.softcap is None:
        scores = torch.baddbmm(flat_mask, flat_q, flat_k.transpose(1, 2), alpha=args.scaling)
    else:
        scores = torch.bmm(flat_q, flat_k.transpose(1, 2)) * (args.scaling / args.softcap)
        scores = args.softcap * torch.tanh(scores) + flat_mask
    if args.sinks_H is None:
        weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    else:
        sinks = args.sinks_H.to(scores.dtype).view(1, heads, group, 1).expand(rows, -1, -1, -1).flatten(0, 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
        weights = weights[..., :-1]
    return torch.bmm(weights.to(v.dtype), flat_v).view(rows, heads, group, -1)


def _empty(like: Tensor, slots: int, length: int) -> Tensor:
    return like.new_empty(slots, like.shape[0], length, like.shape[2])

"""KV cache for generation, and the attention contexts that write it (prefill) and read it (decoding).

Shapes: B rows being decoded (one per slot, from slot 0 without gaps), Hq query heads, Hk key-value heads, D head
size, P tokens of a prompt. Hk and D may differ between layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from realign.api.sample import on_device
from realign.models.network.attention import ATTENTION, PackedContext
from realign.models.network.kernels import PAGE, AttentionArgs, Pages, explicit_attention, paged_attention
from realign.models.network.recurrence import RowsForward, States, run_prompts, run_step

KeyValues: TypeAlias = Mapping[int, tuple[Tensor, Tensor]]
"""Keys [Hk, P, D] and values [Hk, P, Dv] of one prompt, by layer."""

BUCKET = 32
"""Increment, in tokens, of the cache length that attention reads; limits the number of different shapes."""


class KVCache:
    """Static cache of `slots` rows of `length` tokens, with the head shapes of an example prompt's keys and values.

    Memory is committed on first use, as responses grow, since few responses may reach the full length.
    """

    def __init__(self, like: KeyValues, slots: int, length: int) -> None:
        self.slots = slots
        self.length = length
        self.memory = object()
        """Another object whenever keys and values move to new memory."""
        self._blocks, self._layers = self._allocate(like)
        self._ready = 0
        self._clean = slots  # the first `_clean` slots are initialized up to `_ready`
        self._rows: dict[int, Tensor] = {}
        self._part = (0, 0)
        self._views: dict[int, tuple[Tensor, Tensor]] = {}

    def _allocate(self, like: KeyValues) -> tuple[list[Tensor], KeyValues]:
        """Return uninitialized blocks [X, slots, Hk, length, D], and the keys and values of each layer in them.

        One block has the keys and values of all layers with the same shape, so that few operators move a row.
        """
        alike: dict[tuple[int, int, torch.dtype], list[tuple[int, int]]] = {}
        for layer, kv in like.items():
            for which, x in enumerate(kv):
                alike.setdefault((x.shape[0], x.shape[2], x.dtype), []).append((layer, which))
        blocks, views = [], dict[tuple[int, int], Tensor]()
        for (heads, size, _), members in alike.items():
            layer, which = members[0]
            blocks.append(like[layer][which].new_empty(len(members), self.slots, heads, self.length, size))
            views.update(zip(members, blocks[-1], strict=True))
        return blocks, {layer: (views[layer, 0], views[layer, 1]) for layer in like}

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys [slots, Hk, length, D] and values [slots, Hk, length, Dv] of a layer."""
        return self._layers[layer]

    def reach(self, length: int, slots: int | None = None) -> int:
        """Prepare the cache for rows of `length` tokens, and return the number of tokens that attention reads.

        New memory is filled with zeros, since masked entries are multiplied by 0, and 0 * NaN is NaN. `slots` limits
        this to the first slots, for callers that will probably not use the other slots again.
        """
        reached = min(self.length, -(-length // BUCKET) * BUCKET)
        if reached > self._ready:
            self._clear(slice(0, slots), slice(self._ready, reached))
            self._ready = reached
            self._clean = min(self._clean, self.slots if slots is None else slots)
        return reached

    def _clear(self, slots: slice, tokens: slice) -> None:
        for block in self._blocks:
            block[:, slots, :, tokens] = 0

    def fill(self, first: int, last: int, prompt: KeyValues) -> None:
        """Copy a prompt to the start of the slots `first` (inclusive) to `last` (exclusive)."""
        # `reach` left these slots uninitialized, because its caller expected not to use them again
        if last > self._clean:
            self._clear(slice(self._clean, None), slice(0, self._ready))
            self._clean = self.slots
        for layer, kv in prompt.items():
            self.reach(kv[0].shape[1])
            for cache, x in zip(self._layers[layer], kv, strict=True):
                cache[first:last, :, : x.shape[1]] = x

    def resize(self, slots: int, length: int) -> None:
        """See `SlotCache.resize`."""
        old = self._blocks
        self.slots, self.length, self._clean = slots, length, min(self._clean, slots)
        self._blocks, self._layers = self._allocate({i: (k[0], v[0]) for i, (k, v) in self._layers.items()})
        for block, x in zip(self._blocks, old, strict=True):
            # the rest was never initialized, and copying it would commit its memory
            block[:, : self._clean, :, : self._ready] = x[:, : self._clean, :, : self._ready]
        # all of them refer to the old memory or its shape
        self.memory, self._rows, self._part, self._views = object(), {}, (0, 0), {}

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of the slots `sources` to the slots `targets`."""
        for source, target in zip(sources, targets, strict=True):
            for block in self._blocks:
                block[:, target, :, :length] = block[:, source, :, :length]

    def read(self, layer: int, slots: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the first `length` keys and values of the first `slots` slots; the next call reuses the views."""
        if self._part != (slots, length):
            self._part = (slots, length)
            self._views = {i: (k[:slots, :, :length], v[:slots, :, :length]) for i, (k, v) in self._layers.items()}
        return self._views[layer]

    def rows(self, heads: int) -> Tensor:
        """Return the offsets [slots, heads] of first tokens in a layer viewed as [slots * heads * length, D]."""
        if heads not in self._rows:
            device = next(iter(self._layers.values()))[0].device
            self._rows[heads] = torch.arange(self.slots * heads, device=device).view(-1, heads) * self.length
        return self._rows[heads]


class PagedKVCache:
    """KV cache in pages of `PAGE` tokens. A slot has the pages that its text has reached, and no more.

    The host knows all lengths: each step appends one token to each row.
    """

    def __init__(self, like: KeyValues, slots: int, length: int, pages: int | None = None) -> None:
        """Allocate at most `pages`; None allocates enough for all slots at their full length."""
        self.slots = slots
        self.length = length
        self._limit = pages
        self.memory = object()
        """Another object whenever pages move to new memory."""
        pages = 1 + self._count(slots, length)
        self._pools = {layer: k.new_zeros(pages, PAGE, 2 * k.shape[0], k.shape[2]) for layer, (k, _) in like.items()}
        self._free = list(range(1, pages))  # no text has page 0, to which rows without a text write
        self._pages: list[list[int]] = [[] for _ in range(slots)]
        self._tokens = [0] * slots
        """Tokens of each slot. A row that has ended since the last synchronization may have fewer."""
        self._ahead = 0
        """Tokens that each row can get before more pages are reserved."""
        self._table: Tensor | None = None

    def _count(self, slots: int, length: int) -> int:
        """Return the number of pages for so many slots: at most the limit, but at least enough for one full slot."""
        full = slots * self.pages_of(length)
        return full if self._limit is None else min(full, max(self._limit, self.pages_of(length)))

    @staticmethod
    def pages_of(tokens: int) -> int:
        """Return the number of pages for so many tokens."""
        return -(-tokens // PAGE)

    def __getitem__(self, layer: int) -> Tensor:
        """Keys and values [pages, PAGE, 2 Hk, D] of a layer."""
        return self._pools[layer]

    def reach(self, length: int, slots: int | None = None) -> int:
        """See `SlotCache.reach`; pages are ready when they are assigned."""
        return length

    def room(self, tokens: int) -> int:
        """See `SlotCache.room`. Each row keeps a spare page, so that not every step takes a row out."""
        if self._limit is None or self._limit >= self.slots * self.pages_of(self.length):
            return self.slots
        occupied = sum(1 for pages in self._pages if pages)
        # `tokens + 1`, since the first decode step appends a token before anything else can end
        rows = max(0, len(self._free) - occupied) // self.pages_of(tokens + 1)
        return rows if occupied else max(1, len(self._free) // self.pages_of(tokens + 1))

    def reserve(self, rows: int, tokens: int) -> bool:
        """See `SlotCache.reserve`."""
        ends = [min(n + tokens, self.length) for n in self._tokens[:rows]]
        missing = {
            slot: more for slot, end in enumerate(ends) if (more := self.pages_of(end) - len(self._pages[slot])) > 0
        }
        if sum(missing.values()) > len(self._free):
            return False
        for slot, count in missing.items():
            self._take(slot, count)
        self._ahead = tokens
        return True

    def _take(self, slot: int, count: int) -> None:
        """Assign `count` more pages to a slot."""
        self._pages[slot] += [self._free.pop() for _ in range(count)]
        self._table, self._ahead = None, 0  # a new row has no reserve, even if the others have one

    def fill(self, first: int, last: int, prompt: KeyValues) -> None:
        """See `SlotCache.fill`."""
        tokens = next(iter(prompt.values()))[0].shape[1]
        for slot in range(first, last):
            self.drop(slot)
            self._tokens[slot] = tokens
            self._take(slot, self.pages_of(tokens))
        pages = torch.tensor(self._pages[first:last])
        at = torch.arange(tokens)
        cells = pages[:, at // PAGE] * PAGE + at % PAGE
        for layer, (k, v) in prompt.items():
            pool = self._pools[layer]
            pool.flatten(0, 1)[on_device(cells, pool.device)] = torch.cat([k, v]).transpose(0, 1)

    def resize(self, slots: int, length: int) -> None:
        """See `SlotCache.resize`."""
        first = len(next(iter(self._pools.values())))
        more = max(0, 1 + self._count(slots, length) - first)
        self.memory = object()
        self._pools = {i: torch.cat([x, x.new_zeros(more, *x.shape[1:])]) for i, x in self._pools.items()}
        self._free += range(first, first + more)
        self._pages += [[] for _ in range(slots - self.slots)]
        self._tokens += [0] * (slots - self.slots)
        self.slots, self.length, self._table = slots, length, None

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """See `SlotCache.move`; only the pages change their slots."""
        for source, target in zip(sources, targets, strict=True):
            self.drop(target)
            self._pages[target], self._pages[source] = self._pages[source], []
            self._tokens[target] = self._tokens[source]

    def drop(self, slot: int) -> None:
        """See `SlotCache.drop`."""
        self._free += self._pages[slot]
        self._pages[slot], self._table = [], None

    def advance(self, rows: int) -> tuple[Tensor, int]:
        """Return the pages [rows, W] of the first rows, and the largest number of tokens, with the new one of each."""
        if not self._ahead:  # a caller that has not reserved, such as a probe
            self.reserve(rows, 1)
        self._ahead -= 1
        # at most `length`: a row at its limit repeats its last step until the host sees that it has ended
        self._tokens[:rows] = [min(n + 1, self.length) for n in self._tokens[:rows]]
        if self._table is None:
            # 0 for pages that a row does not have; `Pages.lengths_B` keeps attention from reading them
            table = torch.zeros(self.slots, max(map(len, self._pages)), dtype=torch.int32)
            for slot, pages in enumerate(self._pages):
                table[slot, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
            self._table = on_device(table, next(iter(self._pools.values())).device)
        return self._table[:rows], max(self._tokens[:rows])


def bytes_per_slot(like: KeyValues, length: int) -> int:
    """Return the memory of one slot of `length` tokens, in bytes."""
    return sum(x.shape[0] * length * x.shape[2] * x.element_size() for kv in like.values() for x in kv)


@dataclass(eq=False)
class PrefillContext(PackedContext):
    """Packed attention that stores each layer's keys and values, and the states of recurrent layers.

    Attributes:
        states: for each recurrent layer, the states after each sequence.
    """

    states: dict[int, list[States]] = field(default_factory=dict, init=False, repr=False)
    _seen: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)

    @override
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
        self._seen[layer] = (k[0], v[0])
        return super().attend(layer, q, k, v, args)

    @override
    def recur(self, layer: int, forward: RowsForward, hidden_TH: Tensor) -> Tensor:
        out, self.states[layer] = run_prompts(layer, forward, self._texts(hidden_TH))
        return self._own_rows(out)

    def per_sequence(self) -> Iterator[KeyValues]:
        """Yield the stored keys and values of each packed sequence, after those that it continues.

        Without such they are views, which keep the memory of the whole pack alive.

        Raises:
            ValueError: the model did not use this context.
        """
        if not self._seen and not self.states:
            raise ValueError(f"generation requires a model loaded with attn_implementation={ATTENTION!r}")
        n = self._lengths
        parts = {i: [self._join(x.split(n, 1), 1) for x in kv] for i, kv in self._seen.items()}
        for i in range(len(n)):
            yield {layer: (keys[i], values[i]) for layer, (keys, values) in parts.items()}


class DecodeContext:
    """Attention of one new token in each of B rows to that row's cache slot, for one decode step.

    The new key and value are written first. Indices and masks are computed once per step, and shared by all layers
    with the same number of heads and the same window.
    """

    def __init__(
        self, cache: KVCache, positions_B: Tensor, longest: int, states: Mapping[int, States] | None = None
    ) -> None:
        """Set the positions of the B new tokens. Passing the largest one as `longest` avoids a device sync.

        `states` are those of the recurrent layers, for at least B rows; the step updates them.
        """
        self._states = states or {}
        self.cache = cache
        self._positions_B = positions_B
        self._length = cache.reach(longest + 1)
        self._index: dict[int, Tensor] = {}
        self._masks: dict[tuple[int | None, int, torch.dtype], Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
        """Attend with q [1, Hq, B, D] and the new k, v [1, Hk, B, D] of a layer; return [1, B, Hq, Dv]."""
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return self.attend_rows(layer, q, k, v, args)[None]

    def recur(self, layer: int, forward: RowsForward, hidden_TH: Tensor) -> Tensor:
        """See `RecurrentContext.recur`; hidden_TH are the B new tokens."""
        rows = {name: x[: len(hidden_TH)] for name, x in self._states[layer].items()}
        return run_step(layer, forward, hidden_TH, rows)

    def attend_rows(self, layer: int, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
        """Attend with q [B, Hq, D] and the new k, v [B, Hk, D] of a layer; return [B, Hq, Dv]."""
        rows, heads = k.shape[:2]
        index = self._write_index(heads)
        # one flat index for both, shared by all layers: two operators per layer
        for cache, x in zip(self.cache[layer], (k, v), strict=True):
            cache.view(-1, cache.shape[-1]).index_copy_(0, index, x.reshape(-1, x.shape[-1]))
        queries = q.reshape(rows, heads, -1, q.shape[-1])
        mask = self._mask(args.sliding_window, heads, q.dtype)
        out = _attend(queries, *self.cache.read(layer, rows, self._length), mask, args)
        return out.reshape(rows, q.shape[1], -1)

    def _write_index(self, heads: int) -> Tensor:
        """Return the offsets [B * Hk] of the new tokens in a layer's cache viewed as [slots * Hk * length, D]."""
        if heads not in self._index:
            first = self.cache.rows(heads)[: len(self._positions_B)]
            self._index[heads] = (first + self._positions_B[:, None]).flatten()
        return self._index[heads]

    def _mask(self, window: int | None, heads: int, dtype: torch.dtype) -> Tensor:
        """Return the additive mask [B, Hk, 1, length]: 0 for visible tokens, -inf elsewhere."""
        key = (window if window is not None and window < self._length else None, heads, dtype)
        if key not in self._masks:
            at = torch.arange(self._length, device=self._positions_B.device)
            last = self._positions_B[:, None, None, None]
            hidden = at > last if key[0] is None else (at > last) | (at <= last - key[0])
            self._masks[key] = torch.where(hidden.expand(-1, heads, -1, -1), -torch.inf, 0.0).to(dtype)
        return self._masks[key]


class PagedDecodeContext:
    """Attention of one new token in each of B rows to that row's pages, for one decode step."""

    def __init__(self, cache: PagedKVCache, positions_B: Tensor, table_BW: Tensor, longest: int) -> None:
        """Set the positions of the B new tokens, and what `PagedKVCache.advance` returned for them."""
        self._cache = cache
        page_B = table_BW.gather(1, (positions_B // PAGE)[:, None])[:, 0]
        self._cell_B = page_B * PAGE + positions_B % PAGE
        bounds = torch.arange(len(positions_B) + 1, dtype=torch.int32, device=positions_B.device)
        self._pages = Pages(bounds, table_BW, (positions_B + 1).int(), longest)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
        """See `AttentionContext.attend`."""
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return self.attend_joined(layer, q, torch.cat([k, v], 1), args)[None]

    def attend_joined(self, layer: int, q: Tensor, kv: Tensor, args: AttentionArgs) -> Tensor:
        """Attend with q [B, Hq, D] and the new keys and values kv [B, 2 Hk, D] of a layer; return [B, Hq, D]."""
        pool = self._cache[layer]
        pool.flatten(0, 1).index_copy_(0, self._cell_B, kv)
        return paged_attention(q, pool, args, self._pages)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, args: AttentionArgs) -> Tensor:
    """Attend q [B, Hk, Hq / Hk, D] to k, v [B, Hk, length, D]; the third axis of q is the heads that share keys.

    In fp32 on a CPU, two batched products are up to three times as fast as the fused kernel at these shapes. In half
    precision, only the fused kernel keeps the scores in fp32.
    """
    if args.softcap is not None or args.sinks_H is not None:
        return explicit_attention(q, k, v, args, mask)
    if q.device.type != "cpu" or q.dtype not in (torch.float32, torch.float64):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=args.scaling)
    flat_q, flat_k, flat_v, flat_mask = (x.flatten(0, 1) for x in (q, k, v, mask))
    weights_BL = torch.baddbmm(flat_mask, flat_q, flat_k.transpose(1, 2), alpha=args.scaling).softmax(-1)
    return torch.bmm(weights_BL, flat_v).view(*q.shape[:3], -1)

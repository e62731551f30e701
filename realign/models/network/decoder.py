"""Run a model token by token: prefill of prompts, and decode steps over the cached states of texts in slots.

`PackedDecoder` serves the families that run packed. `unpacked.OwnCache` serves the others.

Shapes: B rows being decoded, H hidden size, N tokens of a pass, T packed tokens, W experts of all routers per token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from realign.api.lengths import Lengths
from realign.api.sample import on_device
from realign.models.network.attention import AttentionContext
from realign.models.network.decode_graphs import DecodeGraphs
from realign.models.network.heads import read_body
from realign.models.network.images import ImageInputs, ImagePrompt, PromptInput, ids_of
from realign.models.network.kernels import CONTEXT, PAGE
from realign.models.network.kv_cache import (
    DecodeContext,
    KeyValues,
    KVCache,
    PagedDecodeContext,
    PagedKVCache,
    PrefillContext,
    bytes_per_slot,
)
from realign.models.network.passes import Layout, share_start
from realign.models.network.recurrence import States
from realign.models.network.routers import Routed, Routers

DTYPE = torch.int16
"""Dtype of recorded experts: that of the key `router_experts`, which has an entry per token, router and choice."""

EXPECTED = 4
"""Limit of a response divided by its expected length, for the number of rows that share a cache in pages."""


class Trunk(Protocol):
    """A model without its last layer."""

    def __call__(self, ids_N: Tensor, positions_N: Tensor, context: AttentionContext) -> Tensor:
        """Return the last hidden states [N, H] of tokens at `positions_N`."""
        ...


class ModuleTrunk:
    """Trunk that runs the original modules of a transformers model."""

    def __init__(self, model: Any) -> None:
        self._base = read_body(model)

    def __call__(self, ids_N: Tensor, positions_N: Tensor, context: AttentionContext) -> Tensor:
        """See `Trunk`."""
        inputs = {"input_ids": ids_N[None], "position_ids": positions_N[None], CONTEXT: context}
        hidden: Tensor = self._base(**inputs, attention_mask=None, use_cache=False).last_hidden_state
        return hidden[0]


class SlotCache(ABC):
    """Cached states of the texts in `slots` slots of up to `length` tokens."""

    slots: int
    length: int
    bounded: bool = False
    """Whether its memory keeps to the limit of `Decoder.new_cache`, however many slots there are."""

    @abstractmethod
    def reach(self, length: int, slots: int | None = None) -> int:
        """See `KVCache.reach`."""

    @abstractmethod
    def fill(self, first: int, last: int, prompt: Any) -> None:
        """Copy the state of a prompt to the slots `first` (inclusive) to `last` (exclusive)."""

    @abstractmethod
    def resize(self, slots: int, length: int) -> None:
        """Change the number of slots, or make them longer. Slots that stay keep their contents."""

    @abstractmethod
    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the states of up to `length` tokens in the slots `sources` to the slots `targets`."""

    def room(self, tokens: int) -> int:
        """Return how many more texts of so many tokens can start, if slots are free."""
        return self.slots

    def reserve(self, rows: int, tokens: int) -> bool:
        """Make room for `tokens` more tokens of each of the first `rows` slots; return whether there is enough."""
        return True

    def drop(self, slot: int) -> None:
        """Free the memory of a text that has ended, if it has memory of its own."""
        return


class Decoder(ABC):
    """Runs a model without its last layer. The state of a text is opaque to rollouts."""

    reads_rows: bool = False
    """Whether a step reads tokens or positions on the host, so that steps cannot run ahead of the host."""
    record_width: int = 0
    """Number of experts that all routers choose for a token; 0 if the decoder does not record them."""
    chosen_NW: Tensor
    """Experts chosen for the N tokens of the last prefill or step, int16 [N, `record_width`], if recorded."""

    @abstractmethod
    def prefill(self, texts: Sequence[PromptInput]) -> tuple[Tensor, list[Any]]:
        """Return the hidden state [len(texts), H] of the last token of each text, and the state of each text."""

    @abstractmethod
    def bytes_per_slot(self, like: Any, length: int) -> int:
        """Return the memory of a slot of `length` tokens for states such as `like`, in bytes."""

    @abstractmethod
    def new_cache(self, like: Any, slots: int, length: int, limit: int | None = None) -> SlotCache:
        """Allocate a cache for states such as `like`; `limit` are its bytes if not all slots may become full."""

    def expected_tokens(self, prompt: int, response: int) -> int:
        """Return the tokens that a slot needs on average, at most, for a prompt and a response of these lengths."""
        return prompt + response

    @abstractmethod
    def step(self, cache: Any, tokens_B: Tensor, positions_B: Tensor, longest: int) -> Tensor:
        """Append a token to the text in each of the first B slots, and return its hidden states [B, H].

        Args:
            cache: a cache from `new_cache`.
            tokens_B: the tokens.
            positions_B: their positions.
            longest: the largest position.
        """


class Text(NamedTuple):
    """State of a text after prefill."""

    kv: KeyValues
    """Keys and values of attention layers."""
    states: Mapping[int, States]
    """States [1, ...] of recurrent layers."""
    shift: int = 0
    """Rotary position of the next token minus the number of tokens; not 0 after images."""


class PackedCache(SlotCache):
    """KV cache of attention layers, and the states of recurrent layers.

    Attributes:
        kv: the KV cache.
        states: for each recurrent layer, its states [slots, ...] by name.
        shifts: [slots] int64, `Text.shift`; None if no text has images.
    """

    def __init__(self, like: Text, kv: KVCache | PagedKVCache) -> None:
        slots = kv.slots
        self.slots, self.length = slots, kv.length
        self.kv = kv
        self.bounded = isinstance(kv, PagedKVCache)
        self.states = {
            layer: {name: x.new_zeros(slots, *x.shape[1:]) for name, x in states.items()}
            for layer, states in like.states.items()
        }
        # created with the first image, so that rollouts of text add nothing to their positions
        self.shifts: Tensor | None = None

    @override
    def reach(self, length: int, slots: int | None = None) -> int:
        return self.kv.reach(length, slots)

    @override
    def fill(self, first: int, last: int, prompt: Text) -> None:
        self.kv.fill(first, last, prompt.kv)
        for layer, states in prompt.states.items():
            for name, x in states.items():
                self.states[layer][name][first:last] = x
        if self.shifts is None and prompt.shift:
            self.shifts = torch.zeros(self.slots, dtype=torch.int64, device=next(iter(prompt.kv.values()))[0].device)
        if self.shifts is not None:
            self.shifts[first:last] = prompt.shift

    @override
    def resize(self, slots: int, length: int) -> None:
        self.slots, self.length = slots, length
        self.kv.resize(slots, length)
        for states in self.states.values():
            for name, x in states.items():
                states[name] = torch.cat([x[:slots], x.new_zeros(max(0, slots - len(x)), *x.shape[1:])])
        if self.shifts is not None:
            self.shifts = F.pad(self.shifts, (0, slots - len(self.shifts)))

    @override
    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        self.kv.move(sources, targets, length)
        shifts = [] if self.shifts is None else [self.shifts]
        for x in (*(x for states in self.states.values() for x in states.values()), *shifts):
            source_M, target_M = (on_device(torch.tensor(rows), x.device) for rows in (sources, targets))
            x[target_M] = x[source_M]

    @override
    def room(self, tokens: int) -> int:
        return self.kv.room(tokens) if isinstance(self.kv, PagedKVCache) else super().room(tokens)

    @override
    def reserve(self, rows: int, tokens: int) -> bool:
        return not isinstance(self.kv, PagedKVCache) or self.kv.reserve(rows, tokens)

    @override
    def drop(self, slot: int) -> None:
        if isinstance(self.kv, PagedKVCache):
            self.kv.drop(slot)


class PackedDecoder(Decoder):
    """Decoder of models that run packed.

    Attributes:
        trunk: the layers.
        images: reads the images of prompts; None if the model does not support images.
        shares: whether a CPU computes the first tokens that all prompts of a prefill have in common once.
        paged: whether keys and values are in pages.
        graphs: runs the steps; None runs the operators of the trunk.
    """

    def __init__(
        self,
        trunk: Trunk,
        routers: Routers | None = None,
        images: ImageInputs | None = None,
        *,
        shares: bool = False,
        paged: bool = False,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """Run `trunk`, and record the choices of its `routers`, if any."""
        self.trunk = trunk
        self.shares = shares
        self.paged = paged
        self.graphs = graphs
        self.images = images
        self._routers = routers
        self.record_width = 0 if routers is None else routers.width

    def _run(self, ids_N: Tensor, positions_N: Tensor, context: AttentionContext) -> Tensor:
        """Run the trunk, and record the choices."""
        if self._routers is None:
            return self.trunk(ids_N, positions_N, context)
        chosen: dict[int, Tensor] = {}

        def note(router: int, routed: Routed) -> Routed:
            chosen[router] = routed.chosen_RK.to(DTYPE)
            return routed

        with self._routers.listen(note):
            hidden_NH = self.trunk(ids_N, positions_N, context)
        self.chosen_NW = torch.cat([chosen[router] for router in range(len(self._routers.modules))], 1)
        return hidden_NH

    @override
    def prefill(self, texts: Sequence[PromptInput]) -> tuple[Tensor, list[Any]]:
        # one packed pass reads all texts
        lengths = Lengths.of([[len(text)] for text in texts])
        ids_T = torch.cat([ids_of(text) for text in texts])
        has_images = self.images is not None and any(isinstance(text, ImagePrompt) for text in texts)
        layout = Layout.plain(lengths)
        if self.shares and ids_T.device.type == "cpu" and not has_images:
            layout = share_start(ids_T.numpy(), lengths, np.zeros(len(texts), dtype=np.int64))
        context = PrefillContext(
            on_device(layout.cu_seqlens, ids_T.device), lengths=layout.pieces.tolist(), after=layout.after.tolist()
        )
        following = lengths.flat.tolist()
        if self.images is not None and has_images:
            hidden_RH, following = self.images.prefill(texts, context)
        else:
            ids_R = ids_T if layout.token_R is None else ids_T[layout.token_R]
            hidden_RH = self._run(ids_R, on_device(layout.position_R, ids_T.device), context)
        last_S = torch.from_numpy(lengths.starts[1:] - 1)
        if layout.row_T is not None:
            last_S = layout.row_T[last_S]
            if self._routers is not None:
                self.chosen_NW = self.chosen_NW[layout.row_T]
        shared = len(layout.pieces) - len(texts)
        kvs = zip(list(context.per_sequence())[shared:], following, lengths.flat.tolist(), strict=True)
        states = [
            Text(kv, {layer: state[shared + i] for layer, state in context.states.items()}, after - length)
            for i, (kv, after, length) in enumerate(kvs)
        ]
        return hidden_RH[on_device(last_S, hidden_RH.device)], states

    @override
    def bytes_per_slot(self, like: Text, length: int) -> int:
        states = sum(x.nbytes for states in like.states.values() for x in states.values())
        return bytes_per_slot(like.kv, length) + states

    @override
    def new_cache(self, like: Text, slots: int, length: int, limit: int | None = None) -> PackedCache:
        if not self.paged:
            return PackedCache(like, KVCache(like.kv, slots, length))
        pages = None if limit is None else limit // bytes_per_slot(like.kv, PAGE)
        return PackedCache(like, PagedKVCache(like.kv, slots, length, pages))

    @override
    def expected_tokens(self, prompt: int, response: int) -> int:
        # most responses end long before their limit, and a row that needs a page while none is free waits for one
        return prompt + (max(response // EXPECTED, min(response, PAGE)) if self.paged else response)

    @override
    def step(self, cache: PackedCache, tokens_B: Tensor, positions_B: Tensor, longest: int) -> Tensor:
        # only fused trunks have graphs or pages, and those have neither recurrent states nor images (`shifts`)
        if self.graphs is not None:
            return self.graphs.step(cache.kv, tokens_B, positions_B, longest)
        if isinstance(cache.kv, PagedKVCache):
            context = PagedDecodeContext(cache.kv, positions_B, *cache.kv.advance(len(positions_B)))
            return self._run(tokens_B, positions_B, context)
        slots = DecodeContext(cache.kv, positions_B, longest, cache.states)
        rotary_B = positions_B if cache.shifts is None else positions_B + cache.shifts[: len(positions_B)]
        return self._run(tokens_B, rotary_B, slots)

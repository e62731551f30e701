"""Run a model token by token: prefill of prompts, and decode steps over the cached states of texts in slots.

`PackedDecoder` serves the families that run packed. `unpacked.OwnCache` serves the others.

Shapes: B rows being decoded, H hidden size, N tokens of a pass, T packed tokens, W experts of all routers per token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from realign.engines.network.attention import AttentionContext
from realign.engines.network.heads import read_body
from realign.engines.network.images import ImageInputs, ImagePrompt, PromptInput, ids_of
from realign.engines.network.kernels import CONTEXT
from realign.engines.network.kv_cache import DecodeContext, KeyValues, KVCache, PrefillContext, bytes_per_slot
from realign.engines.network.recurrence import States
from realign.engines.network.routers import Routed, Routers
from realign.functional.packed import cu_seqlens_of, position_ids

DTYPE = torch.int16


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


class SlotCache(Protocol):
    """Cached states of the texts in `slots` slots of up to `length` tokens."""

    slots: int
    length: int

    def reach(self, length: int, slots: int | None = None) -> int:
        """See `KVCache.reach`."""
        ...

    def fill(self, first: int, last: int, prompt: Any) -> None:
        """Copy the state of a prompt to the slots `first` (inclusive) to `last` (exclusive)."""
        ...

    def resize(self, slots: int, length: int) -> None:
        """Grow to more slots or longer slots, keeping their contents."""
        ...

    def move(self, source_M: Tensor, target_M: Tensor, length: int) -> None:
        """Copy the states of up to `length` tokens in the slots `source_M` to the slots `target_M`."""
        ...


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
    def new_cache(self, like: Any, slots: int, length: int) -> SlotCache:
        """Allocate a cache for states such as `like`."""

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


class PackedCache:
    """KV cache of attention layers, and the states of recurrent layers. Implements `SlotCache`.

    Attributes:
        kv: the KV cache.
        states: for each recurrent layer, its states [slots, ...] by name.
        shifts: [slots] int64, `Text.shift`; None if no text has images.
    """

    def __init__(self, like: Text, slots: int, length: int) -> None:
        self.slots, self.length = slots, length
        self.kv = KVCache(like.kv, slots, length)
        self.states = {
            layer: {name: x.new_zeros(slots, *x.shape[1:]) for name, x in states.items()}
            for layer, states in like.states.items()
        }
        self.shifts: Tensor | None = None

    def reach(self, length: int, slots: int | None = None) -> int:
        """See `SlotCache.reach`."""
        return self.kv.reach(length, slots)

    def fill(self, first: int, last: int, prompt: Text) -> None:
        """See `SlotCache.fill`."""
        self.kv.fill(first, last, prompt.kv)
        for layer, states in prompt.states.items():
            for name, x in states.items():
                self.states[layer][name][first:last] = x
        if self.shifts is None and prompt.shift:
            self.shifts = torch.zeros(self.slots, dtype=torch.int64, device=next(iter(prompt.kv.values()))[0].device)
        if self.shifts is not None:
            self.shifts[first:last] = prompt.shift

    def resize(self, slots: int, length: int) -> None:
        """See `SlotCache.resize`."""
        self.slots, self.length = slots, length
        self.kv.resize(slots, length)
        for states in self.states.values():
            for name, x in states.items():
                states[name] = torch.cat([x, x.new_zeros(slots - len(x), *x.shape[1:])])
        if self.shifts is not None:
            self.shifts = F.pad(self.shifts, (0, slots - len(self.shifts)))

    def move(self, source_M: Tensor, target_M: Tensor, length: int) -> None:
        """See `SlotCache.move`."""
        self.kv.move(source_M, target_M, length)
        for states in self.states.values():
            for x in states.values():
                x[target_M] = x[source_M]
        if self.shifts is not None:
            self.shifts[target_M] = self.shifts[source_M]


class PackedDecoder(Decoder):
    """Decoder of models that run packed.

    Attributes:
        trunk: the layers.
        images: reads the images of prompts; None if the model does not support images.
    """

    def __init__(self, trunk: Trunk, routers: Routers | None = None, images: ImageInputs | None = None) -> None:
        """Run `trunk`, and record the choices of its `routers`, if any."""
        self.trunk = trunk
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

        with self._routers.heard_by(note):
            hidden_NH = self.trunk(ids_N, positions_N, context)
        self.chosen_NW = torch.cat([chosen[router] for router in range(len(self._routers.modules))], 1)
        return hidden_NH

    @override
    def prefill(self, texts: Sequence[PromptInput]) -> tuple[Tensor, list[Any]]:
        # one packed pass reads all texts
        lengths = [len(text) for text in texts]
        cu_seqlens = cu_seqlens_of(lengths).to(ids_of(texts[0]).device)
        context = PrefillContext(cu_seqlens, lengths=lengths)
        following = lengths
        if self.images is not None and any(isinstance(text, ImagePrompt) for text in texts):
            hidden_TH, following = self.images.prefill(texts, context)
        else:
            hidden_TH = self._run(torch.cat([ids_of(text) for text in texts]), position_ids(cu_seqlens), context)
        kvs = zip(context.per_sequence(lengths), following, lengths, strict=True)
        states = [
            Text(kv, {layer: state[i] for layer, state in context.states.items()}, after - length)
            for i, (kv, after, length) in enumerate(kvs)
        ]
        return hidden_TH[cu_seqlens[1:].long() - 1], states

    @override
    def bytes_per_slot(self, like: Text, length: int) -> int:
        states = sum(x.nbytes for states in like.states.values() for x in states.values())
        return bytes_per_slot(like.kv, length) + states

    @override
    def new_cache(self, like: Text, slots: int, length: int) -> PackedCache:
        return PackedCache(like, slots, length)

    @override
    def step(self, cache: PackedCache, tokens_B: Tensor, positions_B: Tensor, longest: int) -> Tensor:
        context = DecodeContext(cache.kv, positions_B, longest, cache.states)
        rotary_B = positions_B if cache.shifts is None else positions_B + cache.shifts[: len(positions_B)]
        return self._run(tokens_B, rotary_B, context)

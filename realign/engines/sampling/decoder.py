"""Model interface of a rollout: prefill of prompts, and decode steps over cached states in slots.

Shapes: B rows being decoded, H hidden size, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from realign.engines.sampling.kv_cache import DecodeContext, KVCache, PrefillContext, bytes_per_slot
from realign.engines.sampling.trunk import Trunk
from realign.functional.packed import cu_seqlens_of, position_ids


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


class Decoder(Protocol):
    """Runs a model without its last layer. The state of a text is opaque to rollouts."""

    def prefill(self, texts: Sequence[Tensor]) -> tuple[Tensor, list[Any]]:
        """Return the hidden state [len(texts), H] of the last token of each text, and the state of each text."""
        ...

    def bytes_per_slot(self, like: Any, length: int) -> int:
        """Return the memory of a slot of `length` tokens for states such as `like`, in bytes."""
        ...

    def new_cache(self, like: Any, slots: int, length: int) -> SlotCache:
        """Allocate a cache for states such as `like`."""
        ...

    def step(self, cache: Any, tokens_B: Tensor, positions_B: Tensor, longest: int) -> Tensor:
        """Append a token to the text in each of the first B slots, and return its hidden states [B, H].

        Args:
            cache: a cache from `new_cache`.
            tokens_B: the tokens.
            positions_B: their positions.
            longest: the largest position.
        """
        ...


class PackedDecoder:
    """Decoder of models that run packed. Implements `Decoder`."""

    def __init__(self, trunk: Trunk) -> None:
        self.trunk = trunk

    def prefill(self, texts: Sequence[Tensor]) -> tuple[Tensor, list[Any]]:
        """See `Decoder.prefill`. One packed pass reads all texts."""
        lengths = [len(ids) for ids in texts]
        cu_seqlens = cu_seqlens_of(lengths).to(texts[0].device)
        context = PrefillContext(cu_seqlens, lengths=lengths)
        hidden_TH = self.trunk(torch.cat(list(texts)), position_ids(cu_seqlens), context)
        return hidden_TH[cu_seqlens[1:].long() - 1], list(context.per_sequence(lengths))

    def bytes_per_slot(self, like: Any, length: int) -> int:
        """See `Decoder.bytes_per_slot`."""
        return bytes_per_slot(like, length)

    def new_cache(self, like: Any, slots: int, length: int) -> KVCache:
        """See `Decoder.new_cache`."""
        return KVCache(like, slots, length)

    def step(self, cache: KVCache, tokens_B: Tensor, positions_B: Tensor, longest: int) -> Tensor:
        """See `Decoder.step`."""
        return self.trunk(tokens_B, positions_B, DecodeContext(cache, positions_B, longest))

"""What a rollout needs of a model: last hidden states of tokens, with attention told what to do by a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from realign.engines.attention import CONTEXT, AttentionContext

SMALL_PRODUCT = 2**23
"""Multiply-adds up to which one core computes a matrix product as fast as two do, measured on 2 cores with MKL."""

READING = 13
"""Multiply-adds that take as long as reading a weight: what a product with one row mostly does."""


def positions_of(model: Any) -> int | None:
    """The longest sequence that a transformers model knows (`max_position_embeddings`); None: no limit is known."""
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit


class Trunk(Protocol):
    """A model without its last layer."""

    def __call__(self, ids_N: Tensor, positions_N: Tensor, context: AttentionContext) -> Tensor:
        """The last hidden states [N, H] of tokens that stand at `positions_N`."""
        ...


class ModuleTrunk:
    """The modules of a transformers model, as its authors wrote them."""

    def __init__(self, model: Any) -> None:
        self._base = model.base_model

    def __call__(self, ids_N: Tensor, positions_N: Tensor, context: AttentionContext) -> Tensor:
        """See `Trunk`."""
        inputs = {"input_ids": ids_N[None], "position_ids": positions_N[None], CONTEXT: context}
        hidden: Tensor = self._base(**inputs, attention_mask=None, use_cache=False).last_hidden_state
        return hidden[0]


@contextmanager
def one_core_for_small_products(trunk: Trunk, module: nn.Module) -> Iterator[Trunk]:
    """The trunk of a model on a CPU, which takes one core where its matrix products are small, as in a decode step."""
    if next(module.parameters()).device.type != "cpu":
        yield trunk
        return
    layers = (m for m in module.modules() if not isinstance(m, nn.Embedding))
    sizes = [p.numel() for layer in layers for p in layer.parameters(recurse=False) if p.ndim == 2]
    mean = sum(sizes) / max(1, len(sizes))
    threads = torch.get_num_threads()
    now = threads

    def thrifty(ids_N: Tensor, positions_N: Tensor, context: AttentionContext) -> Tensor:
        nonlocal now
        wanted = 1 if mean * (len(ids_N) + READING) <= SMALL_PRODUCT else threads
        if wanted != now:
            torch.set_num_threads(wanted)
            now = wanted
        return trunk(ids_N, positions_N, context)

    try:
        yield thrifty
    finally:
        torch.set_num_threads(threads)

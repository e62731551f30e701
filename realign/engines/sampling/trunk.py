"""What a rollout needs of a model: last hidden states of tokens, with attention told what to do by a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from realign.engines.network.attention import CONTEXT, AttentionContext

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


class Cores:
    """Takes one core of a CPU for the passes of a trunk whose matrix products are small, as in a decode step.

    What it sets holds for the thread that runs the trunk (MKL has one number for all of them).
    """

    def __init__(self, module: nn.Module) -> None:
        """Of the trunk's modules."""
        layers = (m for m in module.modules() if not isinstance(m, nn.Embedding))
        sizes = [p.numel() for layer in layers for p in layer.parameters(recurse=False) if p.ndim == 2]
        self._mean = sum(sizes) / max(1, len(sizes))
        self._on_cpu = next(module.parameters()).device.type == "cpu"
        self._threads = self._now = torch.get_num_threads()

    def saved_by(self, trunk: Trunk) -> Trunk:
        """The trunk, with so many cores for each pass as it needs."""
        if not self._on_cpu:
            return trunk

        def thrifty(ids_N: Tensor, positions_N: Tensor, context: AttentionContext) -> Tensor:
            self._set(1 if self._mean * (len(ids_N) + READING) <= SMALL_PRODUCT else self._threads)
            return trunk(ids_N, positions_N, context)

        return thrifty

    def give_back(self) -> None:
        """Take all cores again."""
        self._set(self._threads)

    def _set(self, threads: int) -> None:
        if threads != self._now:
            torch.set_num_threads(threads)
            self._now = threads


@contextmanager
def one_core_for_small_products(trunk: Trunk, module: nn.Module) -> Iterator[Trunk]:
    """The trunk of a model while a rollout runs it, see `Cores`."""
    cores = Cores(module)
    try:
        yield cores.saved_by(trunk)
    finally:
        cores.give_back()

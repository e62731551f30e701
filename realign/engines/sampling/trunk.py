"""Model interface of a rollout: the last hidden states of tokens, with attention defined by a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from realign.engines.network.attention import AttentionContext
from realign.engines.network.heads import read_body
from realign.engines.network.kernels import CONTEXT

SMALL_PRODUCT = 2**23
"""Multiply-adds up to which one core computes a matrix product as fast as two (measured on 2 cores with MKL)."""

READING = 13
"""Multiply-adds that take as long as reading one weight, the dominant cost of a product with one row."""


def positions_of(model: Any) -> int | None:
    """Return the maximum sequence length of a model (`max_position_embeddings`); None if no limit is known."""
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit


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


class Cores:
    """Limits trunk passes with small matrix products, such as decode steps, to one CPU core.

    The setting applies to the thread that runs the trunk. MKL has one thread count for all threads.
    """

    def __init__(self, module: nn.Module) -> None:
        """Measure the matrix sizes of the trunk's modules."""
        layers = (m for m in module.modules() if not isinstance(m, nn.Embedding))
        sizes = [p.numel() for layer in layers for p in layer.parameters(recurse=False) if p.ndim == 2]
        self._mean = sum(sizes) / max(1, len(sizes))
        self._on_cpu = next(module.parameters()).device.type == "cpu"
        self._threads = self._now = torch.get_num_threads()

    def saved_by(self, trunk: Trunk) -> Trunk:
        """Wrap the trunk, so that each pass sets its number of cores."""
        if not self._on_cpu:
            return trunk

        def thrifty(ids_N: Tensor, positions_N: Tensor, context: AttentionContext) -> Tensor:
            self._set(1 if self._mean * (len(ids_N) + READING) <= SMALL_PRODUCT else self._threads)
            return trunk(ids_N, positions_N, context)

        return thrifty

    def give_back(self) -> None:
        """Restore the original number of cores."""
        self._set(self._threads)

    def _set(self, threads: int) -> None:
        if threads != self._now:
            torch.set_num_threads(threads)
            self._now = threads


@contextmanager
def one_core_for_small_products(module: nn.Module) -> Iterator[Cores]:
    """Return the `Cores` of a rollout, and restore the number of cores on exit."""
    cores = Cores(module)
    try:
        yield cores
    finally:
        cores.give_back()

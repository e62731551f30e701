"""`RolloutModel`: the decoder that rollouts build from the current weights, and the cores they use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from realign.api.engine import PipelinableEngine
from realign.api.generation import GenerationConfig
from realign.functional.logprobs import LMHead
from realign.functional.rounding import active_rounding
from realign.models.network.attention import AttentionContext
from realign.models.network.decode_graphs import Capture, DecodeGraphs
from realign.models.network.decoder import Decoder, ModuleTrunk, PackedDecoder, Trunk
from realign.models.network.heads import read_head
from realign.models.network.images import ImageInputs
from realign.models.network.network import Network
from realign.models.network.routers import Routers
from realign.models.network.unpacked import OwnCache
from realign.samplers.in_process.compiled.exact import ExactModel
from realign.samplers.in_process.compiled.fused_layers import FusedTrunk, for_few_rows
from realign.samplers.in_process.compiled.fusion import DecodePath, Fusion, copies_limit
from realign.samplers.in_process.compiled.trunk import CompiledTrunk, Form, StoredLinear
from realign.samplers.in_process.settings import InProcessSampling

SMALL_PRODUCT = 2**23
"""Multiply-adds up to which one core computes a matrix product as fast as two (measured on 2 cores with MKL)."""

_READING = 13
"""Multiply-adds that take as long as reading one weight, the dominant cost of a product with one row."""


class DecodableEngine(PipelinableEngine):
    """An engine over a transformers model, whose layers a decoding loop can run between two calls of the engine."""

    module: Any
    """The transformers model."""
    network: Network
    """The network that training runs."""
    tokenizer: Any
    device: torch.device
    """Device of the weights."""
    fusion: Fusion | None
    """Runs the layers with fewer operators where possible; None if the model or its settings exclude it."""
    sampling: InProcessSampling
    """Settings of the sampler."""


@dataclass(frozen=True, eq=False)
class RolloutModel:
    """A language model as rollouts run it."""

    module: Any
    """A transformers causal LM loaded with the attention `realign.models.network.attention.ATTENTION`."""
    head: LMHead
    """Its last layer."""
    fusion: Fusion | None = None
    """Runs the layers with fewer operators where possible; None runs the modules."""
    own_cache: OwnCache | None = None
    """Decodes with a model that cannot run packed; None runs packed."""
    images: ImageInputs | None = None
    """Reads the images of prompts; None if the model does not support images."""
    routers: Routers | None = None
    """Routers of the model whose choices are recorded; None records nothing."""
    shares: bool = False
    """Whether the first tokens that all prompts have in common are computed once."""
    exact: ExactModel | None = None
    """Decodes with the bits of training passes; None decodes as fast as possible."""

    @classmethod
    def of(cls, network: Network, module: Any, config: GenerationConfig, fusion: Fusion | None = None) -> RolloutModel:
        """Return the model with which a network samples.

        Args:
            network: the network that training runs.
            module: the transformers model of the network, or a full copy of it.
            config: sampling settings.
            fusion: runs the layers with fewer operators where possible; None runs the modules.

        Raises:
            ValueError: the model has a scalar head.
            ConfigError: the config asks for choices of experts that the model cannot replay, or for Q heads that it
                does not have.
        """
        if not isinstance(head := read_head(module), LMHead):
            raise ValueError(f"models.{network.name}: a model with a scalar head cannot generate. Set head=causal.")
        return cls(
            module,
            network.sampling_head(head, config),
            fusion=fusion,
            own_cache=network.abilities.own_cache,
            images=network.abilities.images,
            routers=network.recorded_routers(config, module),
            shares=network.abilities.shares,
            exact=network.exact if isinstance(network.exact, ExactModel) else None,
        )

    def prepare(self, length: int, cores: Cores) -> tuple[Decoder, LMHead]:
        """Build decoder and head of a rollout from the current weights, which are cast and joined once for all steps.

        Args:
            length: number of positions to support.
            cores: limits small products to one core.
        """
        if self.exact is not None:
            return self.exact.decoder(length), self.exact.head(self.head)
        if (rounded := active_rounding()) is not None:
            rounded.forget()
        head = self.head
        device = next(self.module.parameters()).device
        if (dtype := product_dtype(device)) != torch.float32:
            head = replace(head, weight_VH=head.weight_VH.to(dtype))
        if self.own_cache is not None:
            return self.own_cache, head
        if self.fusion is None:
            trunk = cores.wrap(ModuleTrunk(self.module))
            return PackedDecoder(trunk, self.routers, self.images, shares=self.shares), head
        trunk = self.fusion.trunk(length, dtype)
        if rounded is None:
            head = replace(head, weight_VH=for_few_rows(head.weight_VH.detach()))
        elif isinstance(trunk, CompiledTrunk):
            form = Form.of_rounded(trunk.library)
            head = replace(head, product=StoredLinear.of(trunk.library, form, head.weight_VH))
        paged = self.routers is None and isinstance(trunk, FusedTrunk) and trunk.runs_paged
        replays = isinstance(trunk, FusedTrunk) and self.fusion.path.now is DecodePath.graphs
        graphs = DecodeGraphs(trunk, Capture(device)) if replays else None
        wrapped = cores.wrap(trunk)
        return PackedDecoder(wrapped, self.routers, self.images, shares=self.shares, paged=paged, graphs=graphs), head


def product_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products on a device, which autocast can lower."""
    enabled = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if enabled else torch.float32


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

    def wrap(self, trunk: Trunk) -> Trunk:
        """Wrap the trunk, so that each pass sets its number of cores."""
        if not self._on_cpu:
            return trunk

        def thrifty(ids_N: Tensor, positions_N: Tensor, context: AttentionContext) -> Tensor:
            self._set(1 if self._mean * (len(ids_N) + _READING) <= SMALL_PRODUCT else self._threads)
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
def frozen_casts_kept(module: nn.Module) -> Iterator[None]:
    """Let the surrounding autocast context cast each frozen weight once, if the casts fit in memory.

    autocast keeps only the casts of weights that require gradients. Otherwise each decode step of a frozen model, or of
    the full copy of a sharded one, would cast all weights again.
    """
    device = next(module.parameters()).device
    frozen = [p for p in module.parameters() if not p.requires_grad and p.dtype == torch.float32]
    if not torch.is_autocast_enabled(device.type) or 2 * sum(p.numel() for p in frozen) > copies_limit(device):
        frozen = []
    for parameter in frozen:
        parameter.requires_grad_(True)  # no gradient is recorded, since rollouts run under `no_grad`
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def positions_of(model: Any) -> int | None:
    """Return the maximum sequence length of a model (`max_position_embeddings`); None if no limit is known."""
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit

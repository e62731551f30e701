"""`RolloutModel`: a language model as rollouts run it, with the decoder that each rollout builds from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from realign.api.generation import GenerationConfig
from realign.engines.network.heads import read_head
from realign.engines.network.images import ImageReader
from realign.engines.network.network import Network
from realign.engines.network.routers import Routers
from realign.engines.sampling.captured_steps import CapturedDecoder
from realign.engines.sampling.decoder import Decoder, PackedDecoder
from realign.engines.sampling.fused_layers import FusedTrunk, for_few_rows
from realign.engines.sampling.own_cache import OwnCache
from realign.engines.sampling.resources import RolloutResources
from realign.engines.sampling.trunk import Cores, ModuleTrunk
from realign.engines.sampling.weight_fusion import Fusion
from realign.functional.logprobs import LMHead


@dataclass(frozen=True, eq=False)
class RolloutModel:
    """A language model as rollouts run it."""

    module: Any
    """A transformers causal LM loaded with the attention `realign.engines.network.attention.ATTENTION`."""
    head: LMHead
    """Its last layer."""
    fusion: Fusion | None = None
    """Runs the layers with fewer operators where possible; None runs the modules."""
    own_cache: OwnCache | None = None
    """Decodes with a model that cannot run packed; None runs packed."""
    images: ImageReader | None = None
    """Reads the images of prompts; None if the model does not support images."""
    routers: Routers | None = None
    """Routers of the model whose choices are recorded; None records nothing."""

    @classmethod
    def of(cls, network: Network, module: Any, config: GenerationConfig) -> RolloutModel:
        """Return the model with which a network samples.

        Args:
            network: the network that training runs.
            module: the transformers model of the network, or a full copy of it.
            config: sampling settings.

        Raises:
            ValueError: the model has a scalar head.
            ConfigError: the config asks for choices of experts that the model cannot replay.
        """
        if not isinstance(head := read_head(module), LMHead):
            raise ValueError(f"models.{network.name}: a model with a scalar head cannot generate. Set head=causal.")
        return cls(
            module,
            network.limited(head),
            fusion=network.fusion,
            own_cache=network.own_cache,
            images=network.images,
            routers=network.recorded_routers(config, module),
        )

    def prepared(self, length: int, cores: Cores, resources: RolloutResources) -> tuple[Decoder, LMHead]:
        """Build decoder and head of a rollout from the current weights, which are cast and joined once for all steps.

        Args:
            length: number of positions to support.
            cores: limits small products to one core.
            resources: memory for the copies of the weights.
        """
        head, memory, captured = self.head, resources.memory, resources.captured
        device = next(self.module.parameters()).device
        dtype = torch.float32
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
            head = replace(head, weight_VH=head.weight_VH.to(dtype))
        if self.own_cache is not None:
            return self.own_cache, head
        if self.fusion is None:
            return PackedDecoder(cores.saved_by(ModuleTrunk(self.module)), self.routers, self.images), head
        trunk, weight_VH = self.fusion.trunk(length, dtype, memory), for_few_rows(head.weight_VH.detach())
        if memory is not None:
            weight_VH = memory.copied("head", weight_VH)
        head = replace(head, weight_VH=weight_VH)
        plain = self.routers is None and self.images is None
        if captured is not None and plain and isinstance(trunk, FusedTrunk):
            return CapturedDecoder(trunk, captured), head
        return PackedDecoder(cores.saved_by(trunk), self.routers, self.images), head

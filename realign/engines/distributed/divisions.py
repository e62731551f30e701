"""`Divisions`: whether the ranks of a mesh can divide a model.

The answer follows from the settings and the modules of a model, which may have no memory. So `realign plan` asks for
many meshes, and `realign check` and each launch for the mesh of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from realign.engines.distributed.expert_parallel import check_experts, experts_of
from realign.engines.distributed.pipeline_parallel import Cut
from realign.engines.distributed.sharding import Sharding
from realign.engines.distributed.tensor_parallel import split_styles
from realign.engines.training.optimizer import OptimizerSpec
from realign.errors import ConfigError
from realign.models.network.branches import read_stack
from realign.models.network.passes import rewrites_rope
from realign.models.network.recurrence import has_recurrent_layers
from realign.models.network.trains import Trained, adapted_layers
from realign.models.parts import divide_layers, sizes_for_stages


@dataclass(frozen=True, eq=False)
class Divisions:
    """What decides whether ranks can divide the model of a role."""

    role: str
    module: Any
    """The transformers model, prepared to train; see `Trained.prepare`."""
    trains: Trained
    value_layers: int = 0
    """Number of layers that a value head copies."""
    compiles: bool = False
    """Whether the layers are compiled."""
    replays: bool = False
    """Whether choices of experts are replayed."""
    optimizer: OptimizerSpec | None = None

    def check(self, sharding: Sharding, ranks: int) -> None:
        """Check that this many ranks, more than one, can divide the model.

        Raises:
            ConfigError: they can't. The message has the setting and the reason.
        """
        sharding.sizes(self.role, ranks)
        if self.optimizer is not None:
            check_elementwise(self.role, self.optimizer)
        if sharding.context > 1:
            self._check_context(sharding)
        if sharding.pipeline > 1:
            self._check_stages(sharding)
        if sharding.tensor * sharding.expert > 1:
            self._check_layers(sharding)

    @property
    def _family(self) -> str:
        return f"model family {self.module.config.model_type!r}"

    def _key(self, name: str, ranks: int) -> str:
        return f"models.{self.role}.sharding.{name}={ranks}"

    @cached_property
    def _layers(self) -> nn.ModuleList:
        return read_stack(self.module).layers

    def _check_context(self, sharding: Sharding) -> None:
        key = self._key("context", sharding.context)
        if rewrites_rope(self.module):
            raise ConfigError(
                f"{key}: {self._family} changes its rotary positions for the longest sequence. Remove this key."
            )
        if has_recurrent_layers(self.module):
            raise ConfigError(f"{key}: the model has recurrent layers, which need whole sequences. Remove this key.")
        sharding.check_heads(self.role, self.module.config.get_text_config().num_attention_heads)

    def _check_layers(self, sharding: Sharding) -> None:
        """Check that ranks can divide layers by heads, neurons and experts."""
        divides = sharding.expert > 1
        key = self._key("expert", sharding.expert) if divides else self._key("tensor", sharding.tensor)
        experts = experts_of(self.module, self._layers)
        if divides and not experts:
            raise ConfigError(f"{key}: transformers has no expert plan for {self._family}. Remove this key.")
        adapted = {} if self.trains.adapter_rank is None else adapted_layers(self._layers)
        for path, part in experts.items():
            check_experts(key, part.num_experts, sharding.expert * sharding.tensor, adapted=path in adapted)
        if sharding.tensor > 1:
            split_styles(self.role, self.module, self._layers, sharding.tensor, adapted=adapted, experts=experts)

    def _check_stages(self, sharding: Sharding) -> None:
        key = self._key("pipeline", sharding.pipeline)
        if sharding.pipeline > len(self._layers):
            raise ConfigError(f"{key}: must be at most the number of layers ({len(self._layers)})")
        if self.compiles:
            raise ConfigError(f"{key}: not supported with torch_compile. Set models.{self.role}.torch_compile=off.")
        if self.replays:
            raise ConfigError(
                f"models.{self.role}: choices of experts cannot be replayed: {no_replay(self.role, sharding)} Set "
                "generation.router_replay=false."
            )
        stages = self.stages(sharding.pipeline)
        if self.value_layers > len(stages[-1]):
            raise ConfigError(
                f"{key}: the last stage has {len(stages[-1])} layers, but the value head of models.{self.role} copies "
                f"{self.value_layers}. Set models.{self.role}.head.value_head.layers to at most {len(stages[-1])}."
            )
        if self.optimizer is not None:
            cut = Cut(self.module, self.module, stages)
            trained = [cut.owners(p) for p in self.module.parameters() if p.requires_grad]
            check_trained_stages(self.role, self.trains, trained, sharding.pipeline)

    def stages(self, n: int) -> list[range]:
        """Return the layers of each stage of a pipeline."""
        return divide_layers(sizes_for_stages(self.module, self._layers), n)


def check_trained_stages(role: str, trains: Trained, trained: Iterable[Sequence[int]], stages: int) -> None:
    """Check that each stage of a pipeline has a weight that trains.

    Args:
        role: role of the model.
        trains: weights that train.
        trained: the stages of each of these weights.
        stages: number of stages.

    Raises:
        ConfigError: a stage has none.
    """
    if missing := sorted(set(range(stages)).difference(*trained)):
        raise ConfigError(
            f"models.{role}.sharding.pipeline={stages}: no weight of stage {missing[0]} trains with trains={trains}. "
            f"Remove this key, or set models.{role}.trains=lora."
        )


def check_elementwise(role: str, spec: OptimizerSpec) -> None:
    """Check that an optimizer can update slices of weights.

    Raises:
        ConfigError: it can't.
    """
    if not spec.elementwise:
        raise ConfigError(
            f"models.{role}.optimizer={spec.label}: it updates whole weights or blocks of them, but each process "
            "has only shards. Use one process, or an optimizer that works element by element, such as AdamW."
        )


def no_replay(role: str, sharding: Sharding) -> str:
    """Return why stages of a pipeline cannot replay choices of experts."""
    return f"models.{role}.sharding.pipeline={sharding.pipeline}: the stages would count changed choices apart."

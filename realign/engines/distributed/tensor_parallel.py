"""Tensor parallelism: the ranks of a mesh divide the heads and neurons of every layer of a transformers model."""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from realign.errors import ConfigError

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
"""The ways to split a linear layer, by their names in a transformers plan."""

COPIED = "replicated_with_grad_allreduce"
"""Name, in a transformers plan, of a part that every rank stores in full and applies to its own heads."""


def split_layers(role: str, module: Any, layers: nn.ModuleList, mesh: DeviceMesh) -> set[str]:
    """Split the linear layers in `layers` by the tensor-parallel plan that transformers has for the model family.

    Embeddings, norms and heads are replicated on every rank. Packed attention runs on the local heads only.

    Returns:
        Names, in `layers`, of replicated parameters whose gradient is summed over ranks.

    Raises:
        ConfigError: the family has no plan, the plan has an unsupported style, or the heads do not divide evenly.
    """
    key, family = f"models.{role}.sharding.tensor_parallel={mesh.size()}", repr(module.config.model_type)
    plan = getattr(module.config, "base_model_tp_plan", None)
    if not plan:
        raise ConfigError(
            f"{key}: transformers has no tensor-parallel plan for model family {family}. Remove this key."
        )
    _check_divides(key, module.config, mesh.size())
    parts: dict[str, object] = {**dict(layers.named_parameters()), **dict(layers.named_modules())}
    styles: dict[str, ParallelStyle] = {}
    copied = set()
    for name, part in parts.items():
        wanted = next((style for path, style in plan.items() if _matches(path, name)), None)
        linear = isinstance(part, nn.Linear)
        if wanted == COPIED:
            copied |= {path for path in dict(layers.named_parameters()) if f"{path}.".startswith(f"{name}.")}
        elif wanted in STYLES and linear:
            styles[name] = STYLES[wanted]()
        elif wanted is not None or linear:
            style = "no style" if wanted is None else f"style {wanted!r}"
            raise ConfigError(
                f"{key}: the plan of model family {family} has {style} for {name!r} ({type(part).__name__}). "
                f"Supported: {', '.join(STYLES)} for plain linear layers, and {COPIED}. Remove this key."
            )
    parallelize_module(layers, mesh, styles)
    return copied


def _matches(path: str, name: str) -> bool:
    """Return whether a plan path, such as `layers.*.mlp.up_proj`, matches a part's name in the list of layers."""
    pattern = re.escape(path.partition(".")[2]).replace(r"\*", r"\d+")
    return re.fullmatch(pattern, name) is not None


def _check_divides(key: str, config: Any, ranks: int) -> None:
    heads = {
        name: getattr(config, name, None)
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    }
    for name, n in heads.items():
        if n is not None and n % ranks:
            raise ConfigError(f"{key}: must divide {name}={n} of the model")

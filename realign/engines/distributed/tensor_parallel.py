"""Tensor parallel: the ranks of a mesh divide the heads and neurons of every layer of a transformers model."""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
"""What a plan of transformers calls the two ways to divide a linear layer."""

COPIED = "replicated_with_grad_allreduce"
"""What it calls a part that every rank has whole and applies to its own heads."""


def split_layers(role: str, module: Any, layers: nn.ModuleList, mesh: DeviceMesh) -> set[str]:
    """Divide the linear layers in `layers` as the plan says that transformers has for the model's family.

    Embeddings, norms and heads stay whole on every rank. Packed attention sees the heads that a rank has, and needs to
    know nothing of the others.

    Returns:
        Names, in `layers`, of parameters that every rank has whole and whose gradient is summed over ranks.

    Raises:
        ValueError: there is no such plan, it asks for something else, or the heads cannot be divided evenly.
    """
    family = f"models.{role}: model family {module.config.model_type!r}"
    plan = getattr(module.config, "base_model_tp_plan", None)
    if not plan:
        raise ValueError(f"{family} has no plan for sharding.tensor_parallel")
    _check_divides(family, module.config, mesh.size())
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
            what = "nothing" if wanted is None else repr(wanted)
            raise ValueError(
                f"{family}: the plan for sharding.tensor_parallel says {what} for {name!r} ({type(part).__name__}); "
                f"known: {', '.join(STYLES)} of plain linear layers, {COPIED}"
            )
    parallelize_module(layers, mesh, styles)
    return copied


def _matches(path: str, name: str) -> bool:
    """Whether a path of a plan, such as `layers.*.mlp.up_proj`, is that of a part of the list of layers."""
    pattern = re.escape(path.partition(".")[2]).replace(r"\*", r"\d+")
    return re.fullmatch(pattern, name) is not None


def _check_divides(family: str, config: Any, ranks: int) -> None:
    heads = {
        name: getattr(config, name, None)
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    }
    for name, n in heads.items():
        if n is not None and n % ranks:
            raise ValueError(f"{family} has {name}={n}, which sharding.tensor_parallel={ranks} does not divide")

"""The importance correction that follows from an external sampler.

A server computes log-probs with other kernels, and often in another precision, than the training engine. Without a
correction, this difference would be part of the probability ratio of the loss.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from realign.config.targets import import_target
from realign.config.words import TARGET

if TYPE_CHECKING:
    from realign.api import ModelSpec

KEY, DEFAULT = "correction", "importance_correction"


def with_default_correction(interfaces: Mapping[str, Any], models: Mapping[str, ModelSpec]) -> dict[str, Any]:
    """Return the interface nodes. Those whose role has an external sampler correct for it, unless `correction` is set.

    Args:
        interfaces: Config nodes of the interfaces.
        models: Model specs by role.
    """
    from realign.api.sampler import samples_externally

    return {
        role: {**node, KEY: DEFAULT}
        if role in models and samples_externally(models[role]) and _corrects(node, f"interfaces.{role}")
        else node
        for role, node in interfaces.items()
    }


def _corrects(node: Any, where: str) -> bool:
    """Return whether an interface has a correction, which its node does not set."""
    if not isinstance(node, Mapping) or KEY in node or TARGET not in node:
        return False
    cls = import_target(node[TARGET], f"{where}.{TARGET}")
    return (
        inspect.isclass(cls) and dataclasses.is_dataclass(cls) and any(f.name == KEY for f in dataclasses.fields(cls))
    )

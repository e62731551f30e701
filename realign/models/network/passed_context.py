"""Families whose layers do not pass keywords on to attention, so that attention would not know the packed sequences.

Hooks of such a layer pass the context of a call on to its attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from realign.models.network.branches import read_stack
from realign.models.network.kernels import CONTEXT

FAMILIES = frozenset({"nemotron", "stablelm"})
"""Values of `model_type` whose attention accepts the keyword, but does not receive it."""

_KEPT = "_realign_context"
"""Attribute of attention with the context of the current pass."""


def pass_context_on(module: Any) -> bool:
    """Let the attention of a model's layers receive the context of each call, in place. Idempotent.

    Returns:
        Whether the model needs this. Its passes cannot run concurrently.
    """
    if module.config.model_type not in FAMILIES:
        return False
    layers: Iterable[Any] = read_stack(module).layers
    for layer in layers:
        if _remember not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(_remember, with_kwargs=True)
            layer.self_attn.register_forward_pre_hook(_add, with_kwargs=True)
    return True


def _remember(layer: Any, arguments: Any, keywords: Mapping[str, Any]) -> None:
    vars(layer.self_attn)[_KEPT] = keywords.get(CONTEXT)


def _add(attention: Any, arguments: Any, keywords: Mapping[str, Any]) -> Any:
    context = vars(attention).get(_KEPT)
    if not torch.is_grad_enabled():  # with gradients, a checkpointed layer computes attention again, without its hook
        vars(attention)[_KEPT] = None  # it may contain large tensors
    return None if context is None else (arguments, {CONTEXT: context, **keywords})

"""Families whose layers do not pass keywords on to attention, so that attention would not know the packed sequences.

Hooks of such a layer pass the context of a call on to its attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any

from realign.engines.network.attention import CONTEXT
from realign.engines.network.branches import read_stack

FAMILIES = frozenset({"nemotron", "stablelm"})
"""Values of `model_type` whose attention accepts the keyword, but does not receive it."""

_CONTEXT: ContextVar[Any] = ContextVar("realign_layer_context", default=None)  # per thread, for concurrent passes


def pass_context_on(module: Any) -> None:
    """Let the attention of a model's layers receive the context of each call, in place. Idempotent."""
    if module.config.model_type not in FAMILIES:
        return
    layers: Iterable[Any] = read_stack(module).layers
    for layer in layers:
        if _remember not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(_remember, with_kwargs=True)
            layer.self_attn.register_forward_pre_hook(_add, with_kwargs=True)


def _remember(layer: Any, arguments: Any, keywords: Mapping[str, Any]) -> None:
    _CONTEXT.set(keywords.get(CONTEXT))


def _add(attention: Any, arguments: Any, keywords: Mapping[str, Any]) -> Any:
    context = _CONTEXT.get()
    _CONTEXT.set(None)  # it may contain large tensors
    return None if context is None else (arguments, {CONTEXT: context, **keywords})


__all__ = ["pass_context_on"]

"""Decoder layers compiled by `torch.compile`, for training and scoring passes.

Attention is excluded from the compiled graphs. It reads the lengths of the packed sequences as Python numbers, which
change with every micro-batch and would cause a compilation each time. The parts before and after attention are
compiled for any number of tokens. All layers of a class share the compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from realign.errors import ConfigError
from realign.models.network.attention import PackedContext, exclude_attention_from_compilation
from realign.models.network.branches import read_stack
from realign.models.network.kernels import CONTEXT
from realign.models.network.recurrence import has_recurrent_layers
from realign.models.network.settings import TorchCompile


class CompiledForward:
    """Replaces the `forward` method of a layer. Only packed passes are compiled; rollouts run the original method.

    Hooks of the layer, activation checkpointing and FSDP run outside of the compiled code. A deep copy of the layer
    contains a copy that refers to the copied layer.
    """

    def __init__(self, layer: Any, compiled: Callable[..., Any], *, checkpoints: bool) -> None:
        """Replace the method of `layer`; `checkpoints` is whether the method can recompute itself."""
        self._layer = layer
        self._compiled = compiled
        self._checkpoints = checkpoints

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Run the layer."""
        layer = self._layer
        if type(keywords.get(CONTEXT)) is not PackedContext:  # the contexts of rollouts are subclasses, or others
            return type(layer).forward(layer, *args, **keywords)
        # the same as transformers' wrapper does, which `_without_checkpointing` has removed from the compiled method
        if self._checkpoints and layer.gradient_checkpointing and layer.training:
            return layer._gradient_checkpointing_func(partial(self._compiled, layer, **keywords), *args)
        return self._compiled(layer, *args, **keywords)


def compile_layers(module: Any, backend: TorchCompile) -> None:
    """Compile the decoder layers of a transformers model in place.

    Raises:
        ConfigError: the layers are not found, or are recurrent.
    """
    if has_recurrent_layers(module):
        raise ConfigError(f"model family {module.config.model_type!r} has recurrent layers.")
    exclude_attention_from_compilation()
    compiled: dict[type, Callable[..., Any]] = {}
    for layer in read_stack(module).layers:
        kind = type(layer)
        if kind not in compiled:
            compiled[kind] = torch.compile(_without_checkpointing(kind), backend=backend.value, dynamic=True)
        checkpoints = _without_checkpointing(kind) is not kind.forward
        layer.forward = CompiledForward(layer, compiled[kind], checkpoints=checkpoints)


def _without_checkpointing(kind: Any) -> Callable[..., Any]:
    """Return the `forward` method without the function with which transformers adds activation checkpointing."""
    method: Any = kind.forward
    # in a loop, since transformers wraps the method of each subclass again
    while method.__code__.co_name == "forward_with_checkpointing":
        method = method.__wrapped__
    return method

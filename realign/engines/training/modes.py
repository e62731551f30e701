"""Modes of the modules during a training pass: dropout and gradient checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from realign.engines.network.network import Network


class TrainingModes:
    """Module modes and random state of training passes.

    Checkpointed layers recompute only in train mode. Without dropout all other modules stay in eval mode, so that
    training and scoring passes compute the same. The dropout of adapters has a separate rate.
    """

    def __init__(self, network: Network, *, dropout: bool, gradient_checkpointing: bool) -> None:
        """Enable gradient checkpointing if requested; dropout stays off until `entered`."""
        self._network = network
        self._dropout = dropout
        self._checkpointed = enable_checkpointing(network.module, dropout) if gradient_checkpointing else []

    @contextmanager
    def entered(self, dropout_seed: Callable[[], int]) -> Iterator[None]:
        """Set modes and random state for a training pass, and restore them on exit.

        Args:
            dropout_seed: returns the seed of the dropout masks; called only if a dropout is active.
        """
        with ExitStack() as stack:
            stack.callback(self._network.eval)
            adapter_dropouts = self._network.trains.dropouts(self._network)
            if self._dropout or adapter_dropouts:
                stack.enter_context(torch.random.fork_rng())
                torch.manual_seed(dropout_seed())
            if self._dropout:
                self._network.train()
            for dropout in adapter_dropouts:
                dropout.train()
            for layer in self._checkpointed:
                layer.training = True
            yield


def enable_checkpointing(module: Any, dropout: bool) -> list[Any]:
    """Enable gradient checkpointing, and return the modules that check their own `training` flag for it."""
    # transformers is renaming this method: use the new name if it exists
    enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    # transformers also hooks the embeddings, for reentrant checkpointing. The hook would disable the fused rollout and
    # make the backward pass go through frozen layers.
    module.disable_input_require_grads()
    checkpointed = [m for m in module.modules() if getattr(m, "gradient_checkpointing", False)]
    for layer in [] if dropout else checkpointed:
        for name, x in vars(layer).items():  # OPT layers store their rates as plain floats
            if isinstance(x, float) and ("dropout" in name or name == "layerdrop"):
                setattr(layer, name, 0.0)
    return checkpointed

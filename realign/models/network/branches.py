"""Branches of a model's trunk: copies of its top layers that run on the inputs of the trunk's top layers.

Each copy is called with the arguments of the layer that it copies (positions, window, attention context), except the
hidden states. A branch therefore attends as the trunk does. `probe.probe_branch` compares a new branch with its
trunk.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from realign.errors import ConfigError
from realign.functional.logprobs import LMHead
from realign.models.network.heads import read_body, read_head

TrunkInputs: TypeAlias = list[tuple[tuple[Any, ...], dict[str, Any]]]
"""Positional and keyword arguments of the trunk's calls to its top layers, in layer order."""

_LAYERS = ("layers", "h")
# in the order in which models apply them: opt projects after its final norm
_AFTER = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "project_out")


class _Stack(NamedTuple):
    """The layers of a model, and the modules that map the output of the last layer to the last hidden states."""

    layers: nn.ModuleList
    after: tuple[nn.Module, ...]

    def top(self, n: int) -> list[nn.Module]:
        """Return the top `n` layers and the modules after them."""
        return [*self.layers[len(self.layers) - n :], *self.after]


def read_stack(module: Any) -> _Stack:
    """Find the layers of a transformers model.

    Raises:
        ConfigError: the layers are not found. The message names the model family.
    """
    base = getattr(body := read_body(module), "decoder", body)  # opt nests its layers one level deeper
    layers = next((x for name in _LAYERS if isinstance(x := getattr(base, name, None), nn.ModuleList)), None)
    after = tuple(x for name in _AFTER if isinstance(x := getattr(base, name, None), nn.Module))
    if layers is None or not after:
        raise ConfigError(
            f"model family {module.config.model_type!r} has no known list of layers followed by a norm. "
            "value_head.layers, trains=top_layers and branch=reference are not available."
        )
    return _Stack(layers, after)


def check_layers(what: str, n: int, stack: _Stack) -> None:
    """Raise ConfigError with the name of the setting `what`, unless 1 <= n <= number of layers."""
    if not 1 <= n <= len(stack.layers):
        raise ConfigError(f"{what}={n}: must be between 1 and {len(stack.layers)}, the number of layers of the model")


class Branch(nn.Module):
    """Copies of a trunk's top layers and final norm, with separate weights."""

    def __init__(self, module: Any, layers: int) -> None:
        super().__init__()
        stack = read_stack(module)
        self._sources = tuple(stack.layers[len(stack.layers) - layers :])  # tuple: not registered as submodules
        # Layers look up their attention in the config at each call. `deepcopy` is told that the config needs no copy,
        # so `use_attention` switches trunk and branch together.
        own_config = {id(module.config): module.config}
        self.layers = copy.deepcopy(nn.ModuleList(self._sources), own_config)
        self.after = copy.deepcopy(nn.ModuleList(stack.after), own_config)

    @contextmanager
    def listening(self) -> Iterator[TrunkInputs]:
        """Record the arguments of the trunk's top layers while the trunk runs."""
        recorded: TrunkInputs = []

        def keep(layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            recorded.append((args, keywords))

        hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in self._sources]
        try:
            yield recorded
        finally:
            for hook in hooks:
                hook.remove()

    def forward(self, recorded: TrunkInputs) -> Tensor:
        """Return the branch's last hidden states [T, H] from the recorded arguments; gradients flow to the trunk."""
        assert len(recorded) == len(self.layers)
        hidden = recorded[0][0][0] if recorded[0][0] else recorded[0][1]["hidden_states"]
        for layer, (args, keywords) in zip(self.layers, recorded, strict=True):
            other_keywords = {k: v for k, v in keywords.items() if k != "hidden_states"}
            out = layer(hidden, *args[1:], **other_keywords)
            hidden = out[0] if isinstance(out, tuple) else out  # layers of some families return more than the states
        for module in self.after:
            hidden = module(hidden)
        return hidden[0]


class ReferenceBranch(nn.Module):
    """A frozen policy: copies of the weights that train, at construction time, over the trunk that does not train."""

    head: LMHead

    def __init__(self, module: Any, layers: int) -> None:
        super().__init__()
        head = read_head(module)
        assert isinstance(head, LMHead)
        self.branch = Branch(module, layers).requires_grad_(False).eval()
        self.head = dataclasses.replace(head, weight_VH=_frozen(head.weight_VH), bias_V=_frozen(head.bias_V))


def _frozen(x: Any) -> Any:
    """Return a copy of a tensor that trains; return anything else unchanged."""
    return x.detach().clone() if isinstance(x, Tensor) and x.requires_grad else x


def train_top(module: Any, layers: int) -> None:
    """Freeze all weights except the top `layers` layers, the final norm and a head not tied to the embeddings."""
    module.requires_grad_(False)
    for part in read_stack(module).top(layers):
        part.requires_grad_(True)
    for parameter in _head_parameters(module):
        parameter.requires_grad_(parameter is not module.get_input_embeddings().weight)


def layers_that_train(module: Any) -> int | None:
    """Return the smallest number of top layers (at least 1) with no trained weight below them.

    Returns None if a weight below all layers trains, such as the embeddings. Embeddings are below all layers even if
    the head is tied to them. The final norm and an untied head are above all layers.
    """
    stack = read_stack(module)
    above = {id(p) for part in stack.top(0) for p in part.parameters()} | {id(p) for p in _head_parameters(module)}
    # a tied head is also the embeddings, and a branch over changed embeddings is not the old policy
    above -= {id(p) for p in module.get_input_embeddings().parameters()}
    trained = {id(p) for p in module.parameters() if p.requires_grad} - above
    for n in range(len(stack.layers) + 1):
        if trained <= {id(p) for layer in stack.top(n) for p in layer.parameters()}:
            return max(n, 1)
    return None


def _head_parameters(module: Any) -> list[Tensor]:
    head = read_head(module)
    return [x for x in vars(head).values() if isinstance(x, Tensor)]

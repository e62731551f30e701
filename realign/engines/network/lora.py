"""LoRA (arXiv:2106.09685) with peft: low-rank trained updates of the linear layers of a frozen model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from realign.engines.network.heads import read_head
from realign.engines.network.output import ScalarHead
from realign.errors import ConfigError

ADAPTER = "default"


SCALAR_HEADS = ("score", "classifier")
"""Names of scalar heads in model families of transformers. All weights of a scalar head train with the adapters."""


def require_peft(what: str) -> None:
    """Raise ConfigError with the name of the setting `what` and the extra, if peft is not installed."""
    if find_spec("peft") is None:
        raise ConfigError(f"{what}=lora: peft is not installed. Run pip install 'realign-rl[peft]'.")


def add_adapters(
    module: Any, *, rank: int, alpha: int, target_modules: str | list[str], dropout: float, path: str, seed: int
) -> None:
    """Add adapters to a transformers model in place. Only the adapters and a scalar head then require gradients.

    Args:
        module: the model.
        rank: rank of an update.
        alpha: LoRA alpha; an update is multiplied by alpha / rank.
        target_modules: names or name suffixes of the adapted layers, or all-linear.
        dropout: dropout probability on the input of A.
        path: folder or hub name of the base model; saved in the config of the adapters.
        seed: seed of the A matrices.

    Raises:
        ConfigError: the target modules do not exist or cannot be adapted.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from transformers.pytorch_utils import Conv1D

    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=target_modules,
        exclude_modules=_scalar_heads(module) or None,
        lora_dropout=dropout,
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in module.modules()),
        base_model_name_or_path=path,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(config, module, adapter_name=ADAPTER)
    adapted = set(_adapted(module).values())
    for name, layer in (("embeddings", module.get_input_embeddings()), ("head", module.get_output_embeddings())):
        if layer in adapted:
            raise ConfigError(
                f"target_modules={target_modules}: LoRA cannot adapt the {name}. Remove the layer from the list."
            )
    head = read_head(module)
    if isinstance(head, ScalarHead):
        for x in (head.weight_1H, head.bias_1):
            if x is not None:
                x.requires_grad_(True)


@contextmanager
def adapters_off(module: Any) -> Iterator[None]:
    """Disable the adapters, so that the model is its frozen base model within the context."""
    layers = list(_adapted(module).values())
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@torch.no_grad()
def merged_state(module: Any) -> dict[str, Tensor]:
    """Return the state dict of an equivalent model with merged adapters; the module is not changed."""
    own: set[int] = set()
    deltas: dict[int, Tensor] = {}
    for layer in _adapted(module).values():
        own |= {id(p) for name in layer.adapter_layer_names for p in getattr(layer, name).parameters()}
        base = getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))  # experts have other names
        deltas[id(base)] = layer.get_delta_weight(ADAPTER)
    state = module.state_dict(keep_vars=True)
    return {
        key.replace(".base_layer", ""): x.detach() + deltas[id(x)] if id(x) in deltas else x.detach()
        for key, x in state.items()
        if id(x) not in own
    }


def save_adapters(module: Any, folder: Path) -> None:
    """Write adapters and scalar head to a folder for `peft.PeftModel.from_pretrained` with the same base model."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    state = get_peft_model_state_dict(module, adapter_name=ADAPTER)
    config = copy.copy(module.peft_config[ADAPTER])
    if heads := _scalar_heads(module):
        config.modules_to_save = heads
        state |= {k: x for k, x in module.state_dict().items() if k.startswith(tuple(f"{name}." for name in heads))}
    folder.mkdir()
    save_file({f"base_model.model.{k}": x.contiguous() for k, x in state.items()}, folder / "adapter_model.safetensors")
    config.save_pretrained(folder)


def adapter_dropouts(module: nn.Module) -> list[nn.Module]:
    """Return the dropout layers of the adapters."""
    return [dropout for layer in _adapted(module).values() for dropout in layer.lora_dropout.values()]


def _scalar_heads(module: Any) -> list[str]:
    return [name for name in SCALAR_HEADS if hasattr(module, name)]


def _adapted(module: Any) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}

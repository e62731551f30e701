"""LoRA (arXiv:2106.09685) through peft: small trained matrices beside the linear layers of a frozen model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realign.engines.heads import read_head
from realign.engines.output import ScalarHead

ADAPTER = "default"


@dataclass
class LoRA:
    """Train low-rank updates W + alpha / rank * B A of linear layers, and a scalar head; all else is frozen.

    The learning rate is the optimizer's: only adapters (and scalar heads) train. B starts at 0, so that the model
    starts as it was. Needs the extra `peft`.

    Attributes:
        rank: of the update.
        alpha: its weight is alpha / rank.
        target_modules: names, or ends of names, of the layers; all-linear takes every linear layer, and the experts of
            a mixture, but not the head.
        dropout: on the input of A, in training only; needs dropout=true of the model.
        merge_on_save: write an ordinary model folder with W + alpha / rank * B A; false writes the adapters alone, as
            a folder of peft, to be loaded by it over the same base model.
    """

    rank: int = 16
    alpha: int = 32
    target_modules: str | list[str] = "all-linear"
    dropout: float = 0.0
    merge_on_save: bool = True

    def __post_init__(self) -> None:
        checks = {
            "rank": (self.rank >= 1, "at least 1"),
            "alpha": (self.alpha > 0, "positive"),
            "target_modules": (bool(self.target_modules), "all-linear, or names of layers"),
            "dropout": (0 <= self.dropout < 1, "in [0, 1)"),
        }
        for name, (ok, valid) in checks.items():
            if not ok:
                raise ValueError(f"lora.{name} must be {valid}, found {getattr(self, name)}")


def require_peft(what: str) -> None:
    """Raise ValueError, with the name of the setting `what` and of the extra, if peft is not installed."""
    if find_spec("peft") is None:
        raise ValueError(f"{what} needs peft, which is not installed: pip install 'realign[peft]'")


def add_adapters(module: Any, spec: LoRA, *, path: str, seed: int) -> None:
    """Put adapters into a transformers model, in place, and let only them and a scalar head require gradients.

    Args:
        module: the model.
        spec: which adapters.
        path: where the base model came from; noted in the config of the adapters.
        seed: of the A matrices.

    Raises:
        ValueError: the target modules are not there or cannot be adapted.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from transformers.pytorch_utils import Conv1D

    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        target_modules=spec.target_modules,
        exclude_modules=[name for name in ("score", "classifier") if hasattr(module, name)] or None,  # they train whole
        lora_dropout=spec.dropout,
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in module.modules()),
        base_model_name_or_path=path,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(config, module, adapter_name=ADAPTER)
    adapted = set(_adapted(module).values())
    for name, layer in (("embeddings", module.get_input_embeddings()), ("head", module.get_output_embeddings())):
        if layer in adapted:
            raise ValueError(f"lora.target_modules={spec.target_modules} takes in the {name}, which cannot be adapted")
    head = read_head(module)
    if isinstance(head, ScalarHead):
        for x in (head.weight_1H, head.bias_1):
            if x is not None:
                x.requires_grad_(True)


@contextmanager
def adapters_off(module: Any) -> Iterator[None]:
    """For a while the model is its frozen base."""
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
    """The state of the same model without adapters that computes the same; the module stays as it is."""
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
    """Write the adapters as a folder that `peft.PeftModel.from_pretrained` reads over the same base model."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    state = get_peft_model_state_dict(module, adapter_name=ADAPTER)
    folder.mkdir()
    save_file({f"base_model.model.{k}": x.contiguous() for k, x in state.items()}, folder / "adapter_model.safetensors")
    module.peft_config[ADAPTER].save_pretrained(folder)


def _adapted(module: Any) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}

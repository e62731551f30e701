"""Base models in 4 bits (QLoRA, arXiv:2305.14314): settings of bitsandbytes, and what they require."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from realign.engines.network.heads import Causal, Head
from realign.engines.network.trains import Lora, Trained
from realign.errors import ConfigError

HEADS = ("lm_head", "embed_out", "score", "classifier")
"""Layers that stay in fp32."""


_REPACKS = "support_avx512bf16_for_cpu"


def check_4bit(what: str, trains: Trained, head: Head, processes: int) -> None:
    """Check that a model can be loaded in 4 bits and trained.

    Args:
        what: key of the model, for messages.
        trains: weights that train.
        head: output of the model.
        processes: number of processes that share the model.

    Raises:
        ConfigError: bitsandbytes is missing, or a setting needs unquantized weights.
    """
    key = f"{what}.load_in_4bit=true"
    if not isinstance(trains, Lora):
        raise ConfigError(f"{key}: weights in 4 bits cannot train. Set {what}.trains=lora.")
    if trains.merge_on_save:
        raise ConfigError(
            f"{key}: adapters cannot be merged into weights in 4 bits. Set {what}.trains.merge_on_save=false, and "
            "merge the saved adapter with realign export --merge."
        )
    if isinstance(head, Causal) and head.value_head is not None and head.value_head.layers:
        raise ConfigError(f"{key}: {what}.head.value_head.layers would copy and train these layers. Set it to 0.")
    if processes > 1:
        raise ConfigError(f"{key}: weights in 4 bits cannot be sharded. Start one process.")
    if find_spec("bitsandbytes") is None:
        raise ConfigError(f"{key}: bitsandbytes is not installed. Run pip install 'realign-rl[quantization]'.")


def settings_4bit(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that load linear layers as 4-bit NormalFloat, double-quantized.

    Args:
        device: device of the model; bitsandbytes quantizes while it loads.
        dtype: dtype of matrix products.
    """
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=list(HEADS),
    )
    return {"quantization_config": config, "device_map": {"": device}}


def keep_layout(module: nn.Module) -> None:
    """Keep the layout of quantized weights. On some CPUs, bitsandbytes would change it in the first scoring pass."""
    for layer in module.modules():
        if hasattr(layer, _REPACKS):
            setattr(layer, _REPACKS, False)

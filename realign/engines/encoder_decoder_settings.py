"""Check the settings of encoder-decoder models, see `realign.engines.network.encoder_decoder`."""

from __future__ import annotations

from typing import Any

from realign.engines.network.heads import is_encoder_decoder
from realign.engines.network.trains import TopLayers, Trained
from realign.errors import ConfigError


def check_settings(
    what: str,
    module: Any,
    *,
    trains: Trained,
    branch_layers: int,
    load_in_4bit: bool,
    own_sampler: bool,
    compiled: bool,
) -> None:
    """Check the settings of a loaded model, if it is an encoder-decoder model.

    Args:
        what: key of the model, for messages.
        module: the model.
        trains: weights that train.
        branch_layers: `head.value_head.layers`.
        load_in_4bit: whether the weights are quantized.
        own_sampler: whether the model samples in its own process.
        compiled: whether `sampler.compiled_decode` is on.

    Raises:
        ConfigError: encoder-decoder models do not support a setting. The message names the key and its cure.
    """
    if not is_encoder_decoder(module.config):
        return
    wrong = {
        f"trains={trains}": ("trains=all or lora", isinstance(trains, TopLayers)),
        f"head.value_head.layers={branch_layers}": ("head.value_head.layers=0", branch_layers > 0),
        "load_in_4bit=true": ("load_in_4bit=false", load_in_4bit),
        "sampler": ("sampler to the in-process sampler", not own_sampler),
        "sampler.compiled_decode=on": ("sampler.compiled_decode=auto", compiled),
    }
    for key, (cure, found) in wrong.items():
        if found:
            raise ConfigError(f"{what}.{key}: not supported by encoder-decoder models. Set {cure}.")


__all__ = ["check_settings"]

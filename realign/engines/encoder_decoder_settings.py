"""Check the settings of encoder-decoder models, see `realign.engines.network.encoder_decoder`."""

from __future__ import annotations

from typing import Any

from realign.api.sampler_spec import SamplerSpec
from realign.engines.network.heads import Causal, Head, is_encoder_decoder
from realign.engines.network.trains import TopLayers, Trained
from realign.engines.sampling.compiled.library import CompiledDecode
from realign.engines.sampling.in_process import InProcessSampling
from realign.errors import ConfigError


def check_settings(
    what: str, module: Any, *, head: Head, trains: Trained, sampler: SamplerSpec, load_in_4bit: bool
) -> None:
    """Check the settings of a loaded model, if it is an encoder-decoder model.

    Args:
        what: key of the model, for messages.
        module: the model.
        head: output of the model.
        trains: weights that train.
        sampler: sampler of responses.
        load_in_4bit: whether the weights are quantized.

    Raises:
        ConfigError: encoder-decoder models do not support a setting. The message names the key and its cure.
    """
    if not is_encoder_decoder(module.config):
        return
    layers = head.value_head.layers if isinstance(head, Causal) and head.value_head is not None else 0
    own = isinstance(sampler, InProcessSampling)
    compiled = isinstance(sampler, InProcessSampling) and sampler.compiled_decode is CompiledDecode.on
    wrong = {
        f"trains={trains}": ("trains=all or lora", isinstance(trains, TopLayers)),
        f"head.value_head.layers={layers}": ("head.value_head.layers=0", layers > 0),
        "load_in_4bit=true": ("load_in_4bit=false", load_in_4bit),
        "sampler": ("sampler to the in-process sampler", not own),
        "sampler.compiled_decode=on": ("sampler.compiled_decode=auto", compiled),
    }
    for key, (cure, found) in wrong.items():
        if found:
            raise ConfigError(f"{what}.{key}: not supported by encoder-decoder models. Set {cure}.")


__all__ = ["check_settings"]

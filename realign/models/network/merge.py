"""Merge an adapter of peft, of any type, into the weights of its base model, and check that the model is the same."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from realign.errors import DataError
from realign.models.files.adapters import PREFIX
from realign.models.files.unread import Computed, Unread, has_unread, read_now
from realign.models.network.heads import is_encoder_decoder
from realign.models.network.trains import (
    ADAPTER,
    SCALAR_HEADS,
    adapted_weights,
    check_same,
    load_head,
    read_adapter,
    require_peft,
)

_PROBED = 8
"""Number of tokens on which a model is compared before and after the merge."""

Place: TypeAlias = tuple[nn.Module, str]
"""A layer, and the name of one of its weights."""


def merge_adapter(module: Any, folder: Path) -> Any:
    """Return the module with an adapter of peft added to its weights: on a few tokens, its logits are those of peft.

    Tied embeddings and head are untied if the adapter changes only one of them, and the embeddings get as many tokens
    as those of the adapter. Weights that are still in their files stay there if the adapter only adds to layers of
    their own; the logits of such a model are not compared, since nothing is computed yet.

    Raises:
        ConfigError: peft is not installed.
        DataError: the weights of the adapter do not fit the module, or the merged model is another one.
    """
    require_peft(f"{str(folder)!r} is an adapter folder, but")
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    from realign.models.network.unpacked import TOLERANCE, relative_error  # not before transformers is needed

    config: Any = PeftConfig.from_pretrained(str(folder))
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise DataError(f"{config.peft_type.value} adapters add inputs to a model, and cannot be merged into weights")
    config.task_type = None  # peft would wrap the head
    config.base_model_name_or_path = module.name_or_path
    # `load_head` loads the scalar head, which may have another name here
    if saved := getattr(config, "modules_to_save", None):
        config.modules_to_save = [name for name in saved if name not in SCALAR_HEADS] or None
    if not _only_adds_product(config):
        read_now(module)
    state, head = read_adapter(folder, PREFIX)
    embeddings = _fit_vocabulary(module, folder, state)
    tied = [names for names in _names(module) if len(names) > 1]
    ties = getattr(module.config, "tie_word_embeddings", False)
    with torch.random.fork_rng(), warnings.catch_warnings():  # initial values, all of which are replaced
        # Deprecations inside transformers, modules that this model lacks, and tied weights, which are untied below.
        warnings.simplefilter("ignore")
        adapted: Any = get_peft_model(module, config, adapter_name=ADAPTER, autocast_adapter_dtype=False)
        places = get_peft_model_state_dict(adapted, adapter_name=ADAPTER, save_embedding_layers=False)
        places = {key: x for key, x in adapted.state_dict().items() if key in embeddings} | places
        check_same(folder, state, places)
        set_peft_model_state_dict(adapted, state, adapter_name=ADAPTER)
        shared = _find_shared_and_adapted(module)
        if shared:
            read_now(module)
        module.eval()
        want = None if has_unread(module) else _logits(module, config)
        for part, name in shared:
            setattr(part, name, _copy(getattr(part, name)))
        merged = _merge_unread(adapted) if want is None else adapted.merge_and_unload(safe_merge=True)
    if ties:  # peft changes it, too
        merged.config.tie_word_embeddings = True
    _tie_again(merged, tied)
    if want is not None:
        error = relative_error(_logits(merged, config), want)
        if not error <= TOLERANCE:  # also NaN
            raise DataError(
                f"the adapter in {str(folder)!r} cannot be merged: the logits of the merged model differ by "
                f"{error:.1e} (relative) from those of the model with the adapter beside it."
            )
    merged.requires_grad_(True)  # peft has frozen the base model
    load_head(merged, folder, head)
    return merged


def _only_adds_product(config: Any) -> bool:
    """Return whether merging adds the product of two matrices to weights, whatever these are."""
    needs_weights = ("use_dora", "lora_bias", "modules_to_save", "trainable_token_indices")
    plain = not any(getattr(config, name, None) for name in needs_weights)
    return plain and config.peft_type == "LORA" and config.init_lora_weights in (True, False, "gaussian")


def _fit_vocabulary(module: Any, folder: Path, state: dict[str, Tensor]) -> set[str]:
    """Give a model the number of tokens of the embeddings that are saved with an adapter; return their names there.

    Raises:
        DataError: the adapter lacks the embeddings or the head of tokens that it adds.
    """
    names = {id(part): f"{PREFIX}{name}." for name, part in module.named_modules()}
    ends = [x for x in (module.get_input_embeddings(), module.get_output_embeddings()) if x is not None]
    found = [
        [key for key in (f"{names[id(x)]}{below}weight" for below in ("", "base_layer.")) if key in state] for x in ends
    ]
    words = len(ends[0].weight)
    sizes = [len(state[key]) for keys in found for key in keys]
    if set(sizes) - {words}:
        if len(set(sizes)) > 1 or [] in found:
            raise DataError(
                f"the adapter in {str(folder)!r} has embeddings of {max(sizes)} tokens, its base model of {words}, and "
                "the adapter lacks the embeddings or the head of some of them. Resize the base model, save it, and set "
                "base_model_name_or_path to its folder."
            )
        read_now(module)
        module.resize_token_embeddings(sizes[0], mean_resizing=False)
    # peft then saves what wraps these layers as well
    wrapped = tuple(f"{names[id(x)]}{below}" for x in ends for below in ("modules_to_save.", "original_module."))
    for key in [key for key in state if key.startswith(wrapped)]:
        del state[key]
    return {key for keys in found for key in keys}


def _names(module: Any) -> Iterable[list[str]]:
    """Return all names of each weight: several for tied weights."""
    names: dict[int, list[str]] = {}
    for name, x in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(x), []).append(name)
    return names.values()


def _find_shared_and_adapted(module: Any) -> list[Place]:
    """Return where layers use the weight of another layer, if an adapter changes one of them.

    Merged into a weight that is shared, the adapter would change all of these layers.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = {id(layer.get_base_layer()) for layer in module.modules() if isinstance(layer, BaseTunerLayer)}
    shared: dict[int, list[Place]] = {}
    for part in module.modules():
        for name, x in part.named_parameters(recurse=False):
            shared.setdefault(id(x), []).append((part, name))
    return [
        place for places in shared.values() if any(id(part) in adapted for part, _ in places) for place in places[1:]
    ]


def _tie_again(module: Any, tied: Iterable[list[str]]) -> None:
    """Tie weights that were tied and are still equal; if they are not, the config says so.

    Raises:
        DataError: the model family cannot have different weights there.
    """
    for names in tied:
        weights = [module.get_parameter(name) for name in names]
        if all(x is weights[0] for x in weights):
            continue
        equal = all(torch.equal(x, weights[0]) for x in weights)
        for name, x in zip(names[1:], weights[1:], strict=True):
            part, _, own = name.rpartition(".")
            setattr(module.get_submodule(part), own, weights[0] if equal else _copy(x))
        if not equal:
            _say_untied(module.config, names)


def _say_untied(config: Any, names: Iterable[str]) -> None:
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = False
    read = type(config).from_dict(config.to_dict())
    if read.tie_word_embeddings or read.get_text_config().tie_word_embeddings:
        raise DataError(
            f"the adapter changes only some of {', '.join(names)}, which are one weight in each model of the family "
            f"{config.model_type!r}. It cannot be merged."
        )


def _copy(x: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(x.detach().clone(), x.requires_grad)


@torch.no_grad()
def _logits(module: Any, config: Any) -> Tensor:
    """Return the logits of a few tokens, among them some of those whose embeddings an adapter with `config` trains."""
    from realign.models.network.attention import ATTENTION, use_attention

    places = module.get_input_embeddings().weight
    ids = torch.linspace(1, len(places) - 1, _PROBED).long()
    trained = getattr(config, "trainable_token_indices", None) or getattr(config, "token_indices", None) or []
    own = [i for part in (trained.values() if isinstance(trained, Mapping) else [trained]) for i in part]
    ids[: len(own[:2])] = torch.tensor(own[:2], dtype=torch.long)
    texts = {"input_ids": ids[None].to(places.device), "use_cache": False}
    if is_encoder_decoder(module.config):
        texts["decoder_input_ids"] = texts["input_ids"]
    attention = module.config._attn_implementation
    if attention == ATTENTION:  # needs a context
        use_attention(module, "eager")
    try:
        logits: Tensor = module(**texts).logits
    finally:
        use_attention(module, attention)
    return logits


def _merge_unread(adapted: Any) -> Any:
    """Merge adapters into weights that are still in their files; the sums are computed when their slices are read."""
    layers = list(adapted_weights(adapted))
    merged = adapted.unload()
    for layer, part, name in layers:
        x = getattr(part, name)
        delta = Unread.of(Computed(partial(layer.get_delta_weight, ADAPTER)), x.shape, x.place)
        setattr(part, name, nn.Parameter(x.detach().add(delta)))
        # Of the weight that it adapts, an adapter now only asks for device and dtype.
        layer.base_layer = nn.Module()
        nothing = nn.Parameter(torch.empty(0, device=x.place), requires_grad=False)
        layer.base_layer.register_parameter(getattr(layer, "parameter_name", "weight"), nothing)
    return merged

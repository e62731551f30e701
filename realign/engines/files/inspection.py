"""Checks of a model before its weights are read: names of weights, hub access and device.

Without them, a run with several models would read gigabytes before it reports a configuration error of the last
model.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from realign.engines.files.model_folder import check_layers, check_model_folder, read_object
from realign.engines.network.heads import Head
from realign.errors import ConfigError, DataError

SCALAR_HEADS = ("score.", "classifier.")
LANGUAGE_HEADS = ("lm_head.", "embed_out.")


def weight_names(folder: Path) -> frozenset[str] | None:
    """Return the names of the weights in a model folder, from the index or safetensors header; None without either.

    Raises:
        DataError: a file cannot be read. The message names the file.
    """
    from safetensors import SafetensorError, safe_open

    index, file = folder / "model.safetensors.index.json", folder / "model.safetensors"
    check_model_folder(folder)
    if (found := read_object(index)) is not None:
        names = frozenset(found["weight_map"])
        check_layers(folder, len(names))
        return names
    if not file.is_file():
        return None
    try:
        with safe_open(file, framework="pt") as weights:
            names = frozenset(weights.keys())
    except SafetensorError as error:
        raise DataError(f"{str(file)!r} is not a safetensors file: {error}. Download the model again.") from error
    check_layers(folder, len(names))
    return names


def check_head(what: str, path: str, names: Collection[str], head: Head, *, random_head: bool) -> None:
    """Check that the configured head matches the weights in a folder.

    Args:
        what: key of the model, for messages.
        path: path of the folder, for messages.
        names: names of its weights.
        head: the configured head.
        random_head: whether a new scalar head is allowed, because the model trains or `Head.replaces` is true.

    Raises:
        DataError: `head` is causal but the folder contains a reward model or critic, or the folder lacks the scalar
            head.
    """
    scalar = sorted(name for name in names if name.startswith(SCALAR_HEADS))
    if head.is_scalar and not scalar and not random_head:
        raise no_trained_head(what, path, head, "score.weight")
    if not head.is_scalar and scalar and not any(name.startswith(LANGUAGE_HEADS) for name in names):
        raise DataError(
            f"{what}.head=causal: {path!r} contains a reward model or critic ({scalar[0]} and no language head). Set "
            f"{what}.path to a language model, or set {what}.head=score."
        )


def no_trained_head(what: str, path: str, head: Head, lacks: str) -> DataError:
    """Return the error for a scalar head that is randomly initialized and never trained."""
    return DataError(
        f"{what}.head={head}: {path!r} has no such head ({lacks} is missing), and the role does not train, so its "
        f"output would be random. Set {what}.path to a folder with that head, such as final/reward of "
        f"experiment=reward_model, or set {what}.head.init."
    )


def check_hub(what: str, name: str, file: str = "config.json") -> None:
    """Check that the files of a hub name are in the local cache if HF_HUB_OFFLINE=1.

    Args:
        what: key of the setting, for messages.
        name: name on the hub.
        file: a file that is in the cache if the model was downloaded.

    Raises:
        ConfigError: the file is not in the cache. The message names the setting and HF_HUB_OFFLINE.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE and not isinstance(try_to_load_from_cache(name, file), str):
        raise ConfigError(
            f"{what}={name!r}: no such folder, and not in the cache of the hub, which HF_HUB_OFFLINE=1 disables. Set "
            f"{what} to a folder, or unset HF_HUB_OFFLINE."
        )


def pick_device(device: str) -> torch.device:
    """Return the torch device of this name; `auto` selects CUDA if it is available.

    Raises:
        ConfigError: the device is unknown to torch, lacks float64, or is CUDA and not available.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r}: unknown device. Use auto, cpu or cuda.") from error
    if found.type == "mps":
        raise ConfigError(f"device={device!r}: MPS has no float64, which statistics and sampling need. Use cpu.")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}: torch finds no CUDA device. Use cpu or auto.")
    return found

"""Adapter folders of peft as the start of a model: finding the base model, and checks before weights are read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from realign.errors import ConfigError, DataError
from realign.models.files.model_folder import INDEX, check_model_folder, read_object, tensor_names
from realign.models.files.model_folder import WEIGHTS as MODEL

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of the names of weights in adapter folders."""


class AdapterStart(StrEnum):
    """What happens to an adapter folder that a model starts from."""

    auto = "auto"
    """Continue the adapter if only adapters are saved (trains=lora with merge_on_save=false), otherwise merge it."""
    merge = "merge"
    """Add the adapter to the weights of its base model. New adapters of trains=lora start from the merged model."""
    continue_ = "continue"
    """Train the adapter of the folder further. Requires trains=lora with the same rank and alpha."""


@dataclass(frozen=True)
class AdapterFolder:
    """A local folder with an adapter of peft."""

    path: Path
    """The folder."""
    base: str
    """Local folder or hub name of the base model."""
    config: Mapping[str, Any]
    """Content of `adapter_config.json`."""

    def check(self, what: str) -> None:
        """Check the files that are read later.

        Args:
            what: key and value of the setting that contains the path, for messages.

        Raises:
            DataError: the weights are missing, or the base model is not a full model.
        """
        check_model_folder(self.path)
        if not (self.path / WEIGHTS).is_file():
            raise DataError(f"{what}: the adapter folder has no {WEIGHTS}. Save the adapter with safetensors.")
        base = Path(self.base)
        if base.is_dir() and not (base / "config.json").is_file():
            raise DataError(
                f"{what}: its base model {self.base!r} is a folder without config.json. Set base_model_name_or_path in "
                f"{str(self.path / CONFIG)!r} to a full model."
            )

    def head_names(self) -> frozenset[str]:
        """Return the names of the adapter's weights that replace weights of the model, such as a scalar head."""
        names = [name.removeprefix(PREFIX) for name in tensor_names(self.path / WEIGHTS)]
        return frozenset(name for name in names if name.startswith(("score.", "classifier.")))


def is_adapter(path: str) -> bool:
    """Return whether a path is a local folder with an adapter and without the weights of a full model."""
    folder = Path(path).expanduser()
    return (folder / CONFIG).is_file() and not _has_model(folder)


def find_adapter(what: str, path: str) -> AdapterFolder | None:
    """Return the adapter in a local folder, or None if the folder contains a full model, and for a hub name.

    Args:
        what: key and value of the setting that contains the path, for messages.
        path: folder or hub name.

    Raises:
        ConfigError: the base model is neither a folder nor a hub name.
        DataError: `adapter_config.json` is invalid, or the folder also contains a full model.
    """
    folder = Path(path).expanduser()
    if not (folder / CONFIG).is_file():
        return None
    if _has_model(folder):
        raise DataError(
            f"{what}: the folder contains both a model and an adapter ({CONFIG}). Remove one of them: transformers "
            "would load the adapter on top of the model."
        )
    config = read_object(folder / CONFIG) or {}
    return AdapterFolder(folder, _base_of(what, folder, config), config)


def _has_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (MODEL, INDEX))


def _base_of(what: str, folder: Path, config: Mapping[str, Any]) -> str:
    """Return the base model: an absolute path, a path relative to the adapter or the current folder, or a hub name."""
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise DataError(f"{what}: {CONFIG} has no base_model_name_or_path. Set it to the base model of the adapter.")
    given = Path(name).expanduser()
    for path in (folder / given, given):  # an absolute path stays the same in both
        if path.is_dir():
            return str(path)
    if re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        return name
    raise ConfigError(
        f"{what}: its base model {name!r} does not exist. Set base_model_name_or_path in {str(folder / CONFIG)!r} to "
        "a folder or hub name."
    )


def check_continues(adapter: AdapterFolder, *, rank: int, alpha: int) -> None:
    """Check that LoRA training can continue an adapter.

    Raises:
        ConfigError: the adapter has another rank or alpha, or a feature that realign does not train. The message
            begins with the setting below `trains`, or with the feature.
    """
    config = adapter.config
    merge = "or set adapter=merge to train a new adapter on top"
    if (kind := config.get("peft_type")) != "LORA":
        raise ConfigError(f"the adapter in {str(adapter.path)!r} is of type {kind}. Set adapter=merge to merge it.")
    for name, key, given in (("rank", "r", rank), ("alpha", "lora_alpha", alpha)):
        if config.get(key) != given:
            raise ConfigError(
                f"trains.{name}={given}: the adapter in {str(adapter.path)!r} has {config.get(key)}. Set "
                f"trains.{name}={config.get(key)}, {merge}."
            )
    plain = {"use_dora": False, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}, "bias": "none"}
    for key, value in plain.items():
        if (value_in_folder := config.get(key) or value) != value:
            raise ConfigError(
                f"the adapter in {str(adapter.path)!r} uses {key}={value_in_folder}, which realign does not train. Set "
                "adapter=merge to merge it."
            )


def absolute(path: str) -> str:
    """Return the absolute path of a local folder, or the hub name."""
    folder = Path(path).expanduser()
    return str(folder.resolve()) if folder.is_dir() else path

"""Options of commands: `plan.devices=8` among overrides, and the settings of `realign chat MODEL key=value ...`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from realign.cli.export import model_folder
from realign.config.construct import fill
from realign.config.errors import ConfigError

T = TypeVar("T")


def split_options(command: str, cls: type[T], words: Sequence[str]) -> tuple[T, list[str]]:
    """Return the options of a command, and the remaining words.

    Args:
        command: name of the command. Its options begin with it and a period.
        cls: dataclass of the options.
        words: overrides and options.

    Raises:
        ConfigError: an option is unknown, or its value is invalid. The message names the option.
    """
    prefix = f"{command}."
    own = [word for word in words if word.startswith(prefix)]
    if wrong := [word for word in own if "=" not in word]:
        raise ConfigError(f"{wrong[0]}: an option has a value, such as {wrong[0]}=1.")
    try:
        given = OmegaConf.to_container(OmegaConf.from_dotlist([word.removeprefix(prefix) for word in own]))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{' '.join(own)}: {error}") from error
    assert isinstance(given, Mapping)
    values = {str(name): value for name, value in given.items()}
    return fill(cls, values, command), [word for word in words if word not in own]


def model_or_run(command: str, path: str) -> str:
    """Return the model of a command: a model folder or hub name as it is, and the final model of a run folder.

    Raises:
        RealignError: the run has several models, or the folder contains no model.
    """
    return str(model_folder(path, command)) if Path(path).expanduser().is_dir() else path


def settings_of(command: str, cls: type[T], words: Sequence[str]) -> T:
    """Return the settings of a command on one model: `MODEL key=value ...`.

    Args:
        command: name of the command, for messages.
        cls: dataclass of the settings, with the model spec as the field `model`.
        words: the command line after the command.

    Raises:
        ConfigError: the command line names no model or several, or a key or value is invalid.
    """
    paths = [word for word in words if "=" not in word]
    if len(paths) != 1:
        raise ConfigError(
            f"realign {command} expects one model (a folder or hub name) and key=value settings, found {paths}"
        )
    given = OmegaConf.to_container(OmegaConf.from_dotlist([word for word in words if "=" in word]))
    assert isinstance(given, Mapping)
    settings: dict[str, Any] = {str(name): value for name, value in given.items()}
    model = settings.get("model", {})
    settings["model"] = {"path": model_or_run(command, paths[0]), **(model if isinstance(model, Mapping) else {})}
    return fill(cls, settings, "")


__all__ = ["model_or_run", "settings_of", "split_options"]

"""Options of commands such as `realign plan`: `plan.devices=8` among the overrides of the experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

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


__all__ = ["split_options"]

"""Environments of other packages as environments or agents of realign. A package is imported when it is used."""

from __future__ import annotations

import importlib
from types import ModuleType

from realign.errors import ConfigError


def import_optional(module: str, *, extra: str, user: str) -> ModuleType:
    """Import a module of an optional package.

    Args:
        module: name of the module.
        extra: extra of realign-rl that installs the package.
        user: class or module that needs it, for the message.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # the package is installed, but not all its dependencies are
        name = module.partition(".")[0].replace("_", "-")
        raise ConfigError(f"{user} needs the package {name}. Run pip install 'realign-rl[{extra}]'.") from error

"""Load an environment class by `package.module:Class` or `path/to/file.py:Class`, and inspect its methods."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from realign.api.environment import Environment
from realign.errors import ConfigError
from realign.rewards.pool.functions import load_object


def load_environment(name: str, arguments: Mapping[str, Any], *, tools: bool = False) -> Callable[[], Environment]:
    """Return a factory that constructs the class `name` with these keyword arguments, once per episode.

    A file is imported like the file of a reward function (`realign.rewards.pool.functions.load_function`). If the class
    has a class method `check`, it is called with the arguments.

    Args:
        name: name of the class.
        arguments: its keyword arguments.
        tools: whether `reset` gets the parameter `tools`.

    Raises:
        ConfigError: the class does not exist, does not accept the arguments, or lacks the methods of an environment.
            Errors of `check` propagate.
    """
    found = load_object(name, "environment", "'package.module:Class' or 'path/to/file.py:Class'")
    if not isinstance(found, type):
        raise ConfigError(f"environment {name!r} is a {type(found).__name__}; expected a class.")
    _takes(found, name, **arguments)
    opened: dict[str, Any] = {"tools": None} if tools else {}
    for method, given, named in (("reset", "row", opened), ("step", "response", {})):
        if not callable(getattr(found, method, None)):
            raise ConfigError(f"environment {name!r} has no method {method}({given}).")
        _takes(getattr(found, method), f"{name}.{method}", "self", given, **named)
    if callable(check := getattr(found, "check", None)):
        check(**arguments)
    return functools.partial(found, **arguments)


def waits(make: Callable[[], Environment]) -> bool:
    """Return whether `reset` is a coroutine function. Such an environment is constructed on the event loop."""
    made = make.func if isinstance(make, functools.partial) else make
    return inspect.iscoroutinefunction(getattr(made, "reset", None))


def takes_seed(reset: Callable[..., Any]) -> bool:
    """Return whether `reset` accepts a seed."""
    parameters = inspect.signature(reset).parameters
    return "seed" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _takes(function: Callable[..., Any], name: str, *positional: str, **keywords: Any) -> None:
    """Raise ConfigError if `function` does not accept these arguments, and a seed if it has such a parameter."""
    try:
        signature = inspect.signature(function)
        seeded = {"seed": 0} if "seed" in signature.parameters and positional else {}
        signature.bind(*positional, **keywords, **seeded)
    except (TypeError, ValueError) as error:  # ValueError: some classes written in C have no signature
        shown = ", ".join([*positional, *(f"{key}=" for key in keywords)])
        raise ConfigError(
            f"environment {name!r} cannot be called as {name.rpartition(':')[2]}({shown}): {error}"
        ) from None

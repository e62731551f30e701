"""Finding an environment by its name, `package.module:Class` or `path/to/file.py:Class`, and looking at its methods."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from realign.api.environment import Environment
from realign.rewards.pool.functions import load_object


def load_environment(name: str, arguments: Mapping[str, Any]) -> Callable[[], Environment]:
    """What makes an environment for one episode: the class called `name`, with these keyword arguments.

    A file is imported as that of a reward function is (`realign.rewards.pool.functions.load_function`).

    Raises:
        ValueError: there is no such class, the import failed, it does not take the arguments, or its methods are not
            those of an environment.
    """
    found = load_object(name, "environment", "'package.module:Class' or 'path/to/file.py:Class'")
    if not isinstance(found, type):
        raise ValueError(f"environment {name!r} is a {type(found).__name__}, expected a class")
    _takes(found, name, **arguments)
    for method, given in (("reset", ("row",)), ("step", ("response",))):
        if not callable(getattr(found, method, None)):
            raise ValueError(f"environment {name!r} has no method {method}({', '.join(given)})")
        _takes(getattr(found, method), f"{name}.{method}", "self", *given)
    return functools.partial(found, **arguments)


def waits(make: Callable[[], Environment]) -> bool:
    """Whether `reset` of what is made is a coroutine function, for which the environment is made in its event loop."""
    made = make.func if isinstance(make, functools.partial) else make
    return inspect.iscoroutinefunction(getattr(made, "reset", None))


def takes_seed(reset: Callable[..., Any]) -> bool:
    """Whether `reset` wants the seed."""
    parameters = inspect.signature(reset).parameters
    return "seed" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _takes(function: Callable[..., Any], name: str, *positional: str, **keywords: Any) -> None:
    """Raise ValueError unless `function` can be called with these, and `reset` with a seed if it takes one."""
    try:
        signature = inspect.signature(function)
        seeded = {"seed": 0} if "seed" in signature.parameters and positional else {}
        signature.bind(*positional, **keywords, **seeded)
    except (TypeError, ValueError) as error:  # ValueError: no signature, as of some classes written in C
        shown = ", ".join([*positional, *(f"{key}=" for key in keywords)])
        raise ValueError(
            f"environment {name!r} cannot be called as {name.rpartition(':')[2]}({shown}): {error}"
        ) from None

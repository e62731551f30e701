"""Load an environment class by `package.module:Class` or `path/to/file.py:Class`, also with the tools of a config."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from realign.api.environment import Environment, Observation, Response
from realign.environments.calls import result_of
from realign.environments.tools import Toolbox, ToolSources
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
    kind = load_object(name, "environment", "'package.module:Class' or 'path/to/file.py:Class'")
    if not isinstance(kind, type):
        raise ConfigError(f"environment {name!r} is a {type(kind).__name__}; expected a class.")
    _takes(kind, name, **arguments)
    opened: dict[str, Any] = {"tools": None} if tools else {}
    for method, given, named in (("reset", "row", opened), ("step", "response", {})):
        if not callable(getattr(kind, method, None)):
            raise ConfigError(f"environment {name!r} has no method {method}({given}).")
        _takes(getattr(kind, method), f"{name}.{method}", "self", given, **named)
    if callable(check := getattr(kind, "check", None)):
        check(**arguments)
    return functools.partial(kind, **arguments)


def waits(make: Callable[[], Environment]) -> bool:
    """Return whether `reset` is a coroutine function. Such an environment is constructed on the event loop."""
    factory = make.func if isinstance(make, functools.partial) else make
    return inspect.iscoroutinefunction(getattr(factory, "reset", None))


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


def load_with_tools(name: str, arguments: Mapping[str, Any], sources: ToolSources) -> Callable[[], Environment]:
    """Return a factory of environments that get tools as the parameter `tools` of `reset`.

    Args:
        name: name of the class.
        arguments: its keyword arguments.
        sources: the tools, which every episode opens.

    Raises:
        ConfigError: the class does not exist, is no environment, its `reset` has no parameter `tools`, or its `step` is
            no `async def`.
    """
    make = load_environment(name, arguments, tools=True)
    kind: Any = make.func if isinstance(make, partial) else make
    if not inspect.iscoroutinefunction(kind.step):
        raise ConfigError(
            f"environment {name!r}: tools and mcp require an `async def step`, since calls of tools are awaited."
        )
    return partial(_ToolEnvironment, make, sources)


class _ToolEnvironment:
    """Opens the tools of an episode before the `reset` of an environment, and closes them after its `close`.

    Args:
        make: constructs the environment.
        sources: the tools.
    """

    def __init__(self, make: Callable[[], Environment], sources: ToolSources) -> None:
        self._make = make
        self._tools = _OpenTools(sources)
        self._world: Any = None

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> tuple[Observation, Mapping[str, Any]]:
        """Open the tools, and start the episode with them."""
        tools = await self._tools.open()

        def begin() -> Any:
            self._world = self._make()
            seeded = {"seed": seed} if takes_seed(self._world.reset) else {}
            return self._world.reset(row, tools=tools, **seeded)

        opening: tuple[Observation, Mapping[str, Any]] = await (begin() if waits(self._make) else result_of(begin))
        return opening

    async def step(self, response: Response) -> tuple[Observation, float, bool, bool, Mapping[str, Any]]:
        """Pass the turn of the policy on."""
        values: tuple[Observation, float, bool, bool, Mapping[str, Any]] = await self._world.step(response)
        return values

    async def close(self) -> None:
        """Close the environment, if it has such a method, and the tools."""
        try:
            if (close := getattr(self._world, "close", None)) is not None:
                await result_of(close)
        finally:
            await self._tools.close()


class _OpenTools:
    """Tools that stay open between the calls of an environment.

    The client of an MCP server must be opened and closed by one task, but each call of an environment is a task.
    """

    def __init__(self, sources: ToolSources) -> None:
        self._sources = sources
        self._end = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> Toolbox:
        """Open the tools.

        Raises:
            ConfigError: two tools have the same name.
            ConnectionError: a server cannot be reached.
        """
        opened: asyncio.Future[Toolbox] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(opened))
        either: set[asyncio.Future[Any]] = {opened, self._task}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not opened.done():
            task, self._task = self._task, None
            await task  # raises
        return opened.result()

    async def _hold(self, opened: asyncio.Future[Toolbox]) -> None:
        async with self._sources.open() as tools:
            opened.set_result(tools)
            await self._end.wait()

    async def close(self) -> None:
        """Close the tools. Raises the errors of a server that ended before."""
        self._end.set()
        if self._task is not None:
            await self._task

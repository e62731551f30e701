"""Tools for policies: Python functions and MCP servers, described by JSON schemas in the format of OpenAI."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

from realign.environments.calls import result_of
from realign.errors import ConfigError
from realign.rewards.pool.functions import load_object
from realign.rewards.pool.http import AS_IT_IS, limit_answer
from realign.secrets import check_url, fill_url, redact, redact_text

_FORMS = "'package.module:function' or 'path/to/file.py:function'"


@dataclass(frozen=True)
class Tool:
    """A tool that a policy can call."""

    schema: Mapping[str, Any]
    """`{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}`."""
    run: Callable[[dict[str, Any]], Awaitable[Any]]
    """Calls the tool with the arguments of the policy."""

    @property
    def name(self) -> str:
        """Name of the tool."""
        return str(self.schema["function"]["name"])


def function_tool(function: Callable[..., Any]) -> Tool:
    """Return a Python function as a tool.

    The function needs type hints, and a docstring in Google style with a line for each argument, from which
    `transformers.utils.get_json_schema` derives the schema. It may be `async def` or `def`; a `def` runs in a thread.

    Raises:
        ConfigError: the schema cannot be derived.
    """
    from transformers.utils import get_json_schema

    name = getattr(function, "__name__", repr(function))
    try:
        schema = get_json_schema(function)
    except Exception as error:  # several exceptions of transformers, and those of evaluating type hints
        raise ConfigError(
            f"tool {name!r}: its schema cannot be derived ({error}). Add type hints to all arguments, and a docstring "
            "that describes the function, and each argument in a section 'Args:'."
        ) from error
    schema["function"].pop("return", None)  # not in the format of OpenAI

    async def run(arguments: dict[str, Any]) -> Any:
        inspect.signature(function).bind(**arguments)  # an error here is the policy's
        return await result_of(partial(function, **arguments))

    return Tool(schema, run)


class Toolbox:
    """The tools of one episode.

    Attributes:
        schemas: the tools in the format of OpenAI, for `tools` of a chat request.

    Raises:
        ConfigError: two tools have the same name.
    """

    def __init__(self, tools: Sequence[Tool | Callable[..., Any]]) -> None:
        self._tools: dict[str, Tool] = {}
        for given in tools:
            tool = given if isinstance(given, Tool) else function_tool(given)
            if tool.name in self._tools:
                raise ConfigError(f"tools: two tools have the name {tool.name!r}. Rename one of them.")
            self._tools[tool.name] = tool
        self.schemas: list[dict[str, Any]] = [dict(tool.schema) for tool in self._tools.values()]

    async def call(self, name: str, arguments: str | Mapping[str, Any]) -> str:
        """Call a tool, and return the text for the policy.

        A policy can request anything. An unknown tool, invalid arguments and an exception of the tool therefore become
        a text that begins with `error:`.

        Args:
            name: name of the tool.
            arguments: a JSON object, as text or parsed.

        Raises:
            ConnectionError, TimeoutError: raised by the tool, which is not the policy's error.
        """
        tool = self._tools.get(name)
        if tool is None:
            return f"error: there is no tool {name!r}; the tools are {', '.join(self._tools) or 'none'}"
        try:
            parsed = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
            if not isinstance(parsed, dict):
                raise ValueError("the arguments must be a JSON object")
            returned = await tool.run(parsed)
            return _encodable(
                returned if isinstance(returned, str) else json.dumps(returned, default=str, ensure_ascii=False)
            )
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            return _encodable(f"error: {type(error).__name__}: {error}")


def _encodable(text: str) -> str:
    """Replace lone surrogates, which JSON of a policy may contain, and which no tokenizer encodes."""
    return text.encode(errors="replace").decode()


@dataclass(frozen=True)
class ToolSources:
    """The tools that a config names, which every episode opens for itself."""

    functions: tuple[Tool, ...]
    servers: tuple[McpServer, ...]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Toolbox]:
        """Connect to the MCP servers, and yield all tools. Closes the connections at the end.

        Raises:
            ConfigError: two tools have the same name.
        """
        async with AsyncExitStack() as stack:
            tools = list(self.functions)
            for server in self.servers:
                client = await stack.enter_async_context(server.connect())
                tools += [Tool(schema, run) for schema, run in await client.tools()]
            yield Toolbox(tools)

    def schemas(self) -> list[dict[str, Any]]:
        """Return the schemas of all tools, for the column `tools` of a dataset.

        Raises:
            ConfigError: two tools have the same name.
            ConnectionError: a server cannot be reached.
        """

        async def list_schemas() -> list[dict[str, Any]]:
            async with self.open() as tools:
                return tools.schemas

        return asyncio.run(list_schemas())


def load_tools(functions: Sequence[str], servers: Sequence[str]) -> ToolSources:
    """Load the tools that a config names.

    Args:
        functions: names of Python functions.
        servers: MCP servers: URLs, or commands that speak MCP over stdin and stdout.

    Raises:
        ConfigError: a function does not exist or has no schema, or the extra `mcp` is missing.
    """
    tools = []
    for name in functions:
        function = load_object(name, "tool", _FORMS)
        if isinstance(function, type) or not callable(function):
            raise ConfigError(f"tool {name!r} is a {type(function).__name__}; expected a function.")
        tools.append(function_tool(function))
    Toolbox(tools)  # checks the names
    return ToolSources(tuple(tools), tuple(map(McpServer.of, servers)))


_ServerTool = tuple[Mapping[str, Any], Callable[[dict[str, Any]], Awaitable[Any]]]
"""Schema of a tool in the format of OpenAI, and a function that calls it."""
KIND = "MCP server"
"""What a URL of this module is, for messages."""
_PAGES = 100
"""Maximum number of pages of a tool list."""
_RESERVED = range(-32768, -31999)
"""Codes of errors of JSON-RPC itself."""


@dataclass(frozen=True)
class McpServer:
    """Address of a server: a URL, or a program that every connection starts."""

    url: str = ""
    command: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: str) -> McpServer:
        """Return the server of a setting: a URL (streamable HTTP), or a command (stdin and stdout).

        Raises:
            ConfigError: the text is no command, the URL is invalid or contains credentials, or the extra `mcp` is
                missing.
        """
        if importlib.util.find_spec("mcp") is None:
            raise ConfigError(
                f"mcp={redact_text(given)}: the package mcp is not installed. Run pip install 'realign-rl[mcp]'."
            )
        if given.startswith(("http://", "https://")):
            check_url(given, KIND)
            fill_url(given, kind=KIND)  # fails if a variable is missing
            return cls(url=given)
        try:
            words = tuple(shlex.split(given))
        except ValueError as error:
            raise ConfigError(f"mcp={redact_text(given)}: cannot read the command ({error}).") from error
        if not words:
            raise ConfigError(f"mcp={given!r}: expected a URL or a command.")
        return cls(command=words)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[_McpTools]:
        """Connect to the server. A command gets only basic environment variables, such as PATH and HOME.

        Raises:
            ConnectionError: the server cannot be reached, or it failed, or its program.
        """
        import httpx2
        from mcp import Client, StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client

        url, secrets = fill_url(self.url, kind=KIND) if self.url else ("", [])
        shown = redact(self.url) if self.url else self.command[0]
        raised: BaseException | None = None

        def describe(error: BaseException) -> str:
            first = _first(error)
            reason = redact_text(f"{type(first).__name__}: {first}".partition("\n")[0])
            for secret in filter(None, secrets):  # a server can repeat it, such as in a redirect
                reason = reason.replace(quote(secret, safe=""), "***").replace(secret, "***")
            return reason

        try:
            async with AsyncExitStack() as stack:
                try:
                    if self.url:
                        # no timeout, since the episode has one
                        http = httpx2.AsyncClient(
                            timeout=None, headers=AS_IT_IS, event_hooks={"response": [limit_answer]}
                        )
                        target: Any = streamable_http_client(url, http_client=await stack.enter_async_context(http))
                    else:
                        target = StdioServerParameters(command=self.command[0], args=list(self.command[1:]))
                    client = await stack.enter_async_context(Client(target))
                except Exception as error:
                    raised = ConnectionError(f"cannot connect to the MCP server {shown!r}: {describe(error)}")
                    raise raised from None
                try:
                    yield _McpTools(client, describe)
                except BaseException as error:
                    raised = error
                    raise
        except BaseException as error:  # the client makes a group of any error
            first = _first(error)
            if (task := asyncio.current_task()) is not None and task.cancelling():
                first = asyncio.CancelledError()
            elif first is not error and first is not raised:  # of the connection
                first = ConnectionError(f"the MCP server {shown!r} failed: {describe(error)}")
        else:
            return
        raise first  # here, where nothing is its context


class _McpTools:
    """An open connection."""

    def __init__(self, client: Any, described: Callable[[BaseException], str]) -> None:
        self._client, self._described = client, described

    async def tools(self) -> list[_ServerTool]:
        """Return the tools of the server.

        Raises:
            ConnectionError: the server failed.
        """
        tools: list[_ServerTool] = []
        cursor = None
        for _ in range(_PAGES):
            page = await self._answer("when it listed its tools", self._client.list_tools(cursor=cursor))
            for tool in page.tools:
                function = {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": dict(tool.input_schema),
                }
                tools.append(({"type": "function", "function": function}, partial(self._call, tool.name)))
            if (cursor := page.next_cursor) is None:
                break
        return tools

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool, and return its text.

        Raises:
            ConnectionError: the server failed.
            ValueError: the server rejected the call, or the tool failed or returned content other than text.
        """
        result = await self._answer(f"in a call of the tool {name!r}", self._client.call_tool(name, arguments))
        if other := [part.type for part in result.content if part.type != "text"]:
            raise ValueError(f"the tool {name!r} returned {other[0]} content, but only text is supported")
        text = "\n".join(part.text for part in result.content)
        if result.is_error:
            raise ValueError(text)
        return text

    async def _answer(self, when: str, call: Awaitable[Any]) -> Any:
        from mcp import MCPError
        from mcp.types import INVALID_PARAMS

        try:
            return await call
        except Exception as error:
            # Other reserved codes are about the connection, the server or its answer, which the policy cannot change.
            if isinstance(error, MCPError) and (error.code == INVALID_PARAMS or error.code not in _RESERVED):
                raise ValueError(str(error)) from error
            raise ConnectionError(f"the MCP server failed {when}: {self._described(error)}") from error


def _first(error: BaseException) -> BaseException:
    """Return the first error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

"""`McpServer`: tools of a server that speaks the Model Context Protocol, through the official client (extra `mcp`)."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

from realign.errors import ConfigError
from realign.rewards.pool.secrets import check_url, filled, masked, masked_text

ServerTool = tuple[Mapping[str, Any], Callable[[dict[str, Any]], Awaitable[Any]]]
"""Schema of a tool in the format of OpenAI, and a function that calls it."""
KIND = "MCP server"
"""What a URL of this module is, for messages."""
_PAGES = 100
"""Maximum number of pages of a tool list."""


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
                f"mcp={masked_text(given)}: the package mcp is not installed. Run pip install 'realign-rl[mcp]'."
            )
        if given.startswith(("http://", "https://")):
            check_url(given, KIND)
            filled(given, kind=KIND)  # fails if a variable is missing
            return cls(url=given)
        try:
            words = tuple(shlex.split(given))
        except ValueError as error:
            raise ConfigError(f"mcp={masked_text(given)}: cannot read the command ({error}).") from error
        if not words:
            raise ConfigError(f"mcp={given!r}: expected a URL or a command.")
        return cls(command=words)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[McpTools]:
        """Connect to the server. A command gets only basic environment variables, such as PATH and HOME.

        Raises:
            ConnectionError: the server cannot be reached, or the program failed.
        """
        from mcp import Client, StdioServerParameters

        target: Any = (
            StdioServerParameters(command=self.command[0], args=list(self.command[1:])) if self.command else ""
        )
        secrets: list[str] = []
        if self.url:
            target, secrets = filled(self.url, kind=KIND)
        async with AsyncExitStack() as stack:
            try:
                client = await stack.enter_async_context(Client(target))
            except Exception as error:
                reason = masked_text(_first(error))
                for secret in filter(None, secrets):
                    reason = reason.replace(quote(secret, safe=""), "***").replace(secret, "***")
                shown = masked(self.url) if self.url else self.command[0]
                raise ConnectionError(f"cannot connect to the MCP server {shown!r}: {reason}") from None
            yield McpTools(client)


class McpTools:
    """An open connection."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def tools(self) -> list[ServerTool]:
        """Return the tools of the server."""
        found: list[ServerTool] = []
        cursor = None
        for _ in range(_PAGES):
            page = await self._client.list_tools(cursor=cursor)
            for tool in page.tools:
                function = {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": dict(tool.input_schema),
                }
                found.append(({"type": "function", "function": function}, partial(self._call, tool.name)))
            if (cursor := page.next_cursor) is None:
                break
        return found

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool, and return its text.

        Raises:
            ConnectionError: the server cannot be reached any more.
            ValueError: the server rejected the call, or the tool failed or returned content other than text.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        try:
            result = await self._client.call_tool(name, arguments)
        except MCPError as error:
            if error.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
                raise ConnectionError(f"the MCP server ended in a call of the tool {name!r}: {error}") from error
            raise ValueError(str(error)) from error
        except Exception as error:  # of the transport
            raise ConnectionError(
                f"the MCP server ended before a call of the tool {name!r}: {_first(error)}"
            ) from error
        if other := [part.type for part in result.content if part.type != "text"]:
            raise ValueError(f"the tool {name!r} returned {other[0]} content, but only text is supported")
        text = "\n".join(part.text for part in result.content)
        if result.is_error:
            raise ValueError(text)
        return text


def _first(error: BaseException) -> str:
    """Return the first error of a group, which the client raises for all failures."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"

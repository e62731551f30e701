"""An MCP server on stdin and stdout, for tests: `python mcp_server.py`."""

from __future__ import annotations

import os

from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("tests", log_level="ERROR")


@server.tool()
def multiply(a: int, b: int) -> str:
    """Multiply two integers."""
    return str(a * b)


@server.tool()
def fail() -> str:
    """Fail."""
    raise RuntimeError("the server broke")


@server.tool()
def draw() -> Image:
    """Draw."""
    return Image(data=b"png", format="png")


@server.tool()
def end() -> str:
    """End the server."""
    os._exit(1)


if __name__ == "__main__":
    server.run("stdio")

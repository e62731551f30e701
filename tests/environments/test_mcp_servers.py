"""Tools of MCP servers; needs the extra mcp."""

from __future__ import annotations

import asyncio
import traceback

import pytest

from realign.environments.tools import McpServer, load_tools
from realign.errors import ConfigError
from tests.environments.environment_fixtures import COMMAND

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _package():
    pytest.importorskip("mcp", reason="needs the extra mcp")


def test_the_tools_of_a_server_on_stdin_and_stdout_are_listed_and_called():
    async def episode():
        async with load_tools(["tests.environments.tool_fixtures:lookup"], [COMMAND]).open() as tools:
            names = [schema["function"]["name"] for schema in tools.schemas]
            schema = tools.schemas[names.index("multiply")]["function"]
            answers = [
                await tools.call("multiply", '{"a": 3, "b": 4}'),
                await tools.call("lookup", '{"word": "un"}'),
                await tools.call("multiply", '{"a": "x"}'),
                await tools.call("fail", "{}"),
                await tools.call("draw", "{}"),
            ]
            return names, schema, answers

    names, schema, (product, word, invalid, failed, drawn) = asyncio.run(episode())
    assert names == ["lookup", "multiply", "fail", "draw", "end"]
    assert schema["description"] == "Multiply two integers."
    assert schema["parameters"]["required"] == ["a", "b"]
    assert schema["parameters"]["properties"]["a"]["type"] == "integer"
    assert product == "12"
    assert word == '{"word": "un", "language": "en"}'
    assert all(text.startswith("error: ValueError") for text in (invalid, failed, drawn))
    assert "only text" in drawn


def test_episodes_have_separate_connections_at_the_same_time():
    sources = load_tools([], [COMMAND])

    async def episode(k: int) -> str:
        async with sources.open() as tools:
            return await tools.call("multiply", {"a": k, "b": 10})

    async def episodes():
        return await asyncio.gather(*map(episode, range(3)))

    assert asyncio.run(episodes()) == ["0", "10", "20"]


def test_a_server_that_ends_fails_the_episode():
    async def episode():
        async with load_tools([], [COMMAND]).open() as tools:
            with pytest.raises(ConnectionError, match="MCP server failed in a call of the tool 'end'"):
                await tools.call("end", "{}")
            with pytest.raises(ConnectionError, match="MCP server failed"):
                await tools.call("multiply", '{"a": 3, "b": 4}')

    asyncio.run(episode())


@pytest.mark.parametrize("given", ["false", "/no/such/program", "http://127.0.0.1:9/mcp"])
def test_a_server_that_cannot_be_reached_is_an_error_that_names_it(given):
    async def connect():
        async with McpServer.of(given).connect():
            raise AssertionError("connected")

    with pytest.raises(ConnectionError, match=f"cannot connect to the MCP server '{given}'"):
        asyncio.run(connect())


@pytest.mark.parametrize(
    "given", ["http://u:s3cret@127.0.0.1:9/mcp", "http://127.0.0.1:9/mcp?token=s3cret", "npx 'server --token=s3cret"]
)
def test_no_message_contains_credentials(given):
    with pytest.raises(ConfigError) as raised:
        McpServer.of(given)
    assert "s3cret" not in str(raised.value)


def test_a_secret_of_the_environment_is_inserted_into_the_url_and_never_shown(monkeypatch):
    monkeypatch.setenv("MCP_TOKEN", "s3cret/value")
    given = "http://127.0.0.1:9/mcp/${oc.env:MCP_TOKEN}"
    with pytest.raises(ConfigError, match=r"MCP server .*: the environment variable MCP_TOKEN looks like a secret"):
        McpServer.of(given)
    monkeypatch.setenv("REALIGN_URL_VARIABLES", "MCP_TOKEN")
    seen = []

    def client(url, **settings):
        seen.append(url)
        raise OSError(f"no connection to {url}")

    monkeypatch.setattr("mcp.client.streamable_http.streamable_http_client", client)

    async def connect():
        async with McpServer.of(given).connect():
            raise AssertionError("connected")

    with pytest.raises(ConnectionError, match="cannot connect to the MCP server") as raised:
        asyncio.run(connect())
    assert seen == ["http://127.0.0.1:9/mcp/s3cret%2Fvalue"]
    assert "s3cret" not in "".join(traceback.format_exception(raised.value))


def test_a_url_is_reached_over_http():
    assert McpServer.of("http://127.0.0.1:9/mcp") == McpServer(url="http://127.0.0.1:9/mcp")

"""Tools of MCP servers; needs the extra mcp."""

from __future__ import annotations

import asyncio
import json
import traceback
from contextlib import contextmanager

import pytest

from realign.environments.tools import McpServer, load_tools
from realign.errors import ConfigError
from tests.bad_answers import BAD, answered, bad_server
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


SILENT = {"a dripping body", "dripping headers", "endlessly provisional", "silence"}
"""Answers that an episode waits for until its deadline."""


def rpc(request, **answer):
    return answered(json.dumps({"jsonrpc": "2.0", "id": request["id"], **answer}).encode())


@contextmanager
def mcp_server(calls, *, method="tools/call"):
    """Serve MCP over HTTP with a tool for each of `calls`, which answers a request of this method."""
    tools = [{"name": name, "inputSchema": {"type": "object"}} for name in calls]
    ours = {"name": "x", "version": "1"}

    def answer(request, number):
        if request is None or "id" not in request:
            return answered(b"", "202 Accepted" if request else "405 No")
        if request["method"] == method:
            return calls[request["params"].get("name", next(iter(calls)))](request)
        if request["method"] == "initialize":
            version = request["params"]["protocolVersion"]
            return rpc(request, result={"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": ours})
        if request["method"] == "tools/list":
            return rpc(request, result={"tools": tools})
        return rpc(request, error={"code": -32601, "message": "no"})

    with bad_server(answer) as url:
        yield url


async def told(url, name):
    """Call a tool in an episode of its own; return its text, or the error of the episode."""
    try:
        async with asyncio.timeout(None) as deadline, load_tools([], [url]).open() as tools:
            # from the call on, since a busy machine may need longer to connect
            deadline.reschedule(asyncio.get_running_loop().time() + (2 if name in SILENT else 20))
            return await tools.call(name, "{}")
    except Exception as error:
        return error


def test_a_server_that_fails_fails_its_episode_and_is_not_what_the_policy_did_wrong(monkeypatch):
    """Each tool fails in another way."""
    monkeypatch.setattr("realign.rewards.pool.http.LARGEST_ANSWER", 2**21)
    bad = {name: lambda request, name=name: BAD[name]() for name in BAD}
    wrong = {
        "no content": lambda request: rpc(request, result={}),
        "no part": lambda request: rpc(request, result={"content": [None]}),
        "a fault of the server": lambda request: rpc(request, error={"code": -32603, "message": "no disk"}),
    }
    text = {"content": [{"type": "text", "text": "42"}]}
    good = {
        "late": lambda request: [0.1, *rpc(request, result=text)],
        "a fault of the policy": lambda request: rpc(request, error={"code": -32602, "message": "no n"}),
        "a fault of the tool": lambda request: rpc(request, error={"code": 0, "message": "n < 0"}),
    }

    async def episodes(url):
        return await asyncio.gather(*(told(url, name) for name in calls))

    calls = bad | wrong | good
    with mcp_server(calls) as url:
        answers = dict(zip(calls, asyncio.run(episodes(url)), strict=True))
    assert {name: answer for name, answer in answers.items() if isinstance(answer, str)} == {
        "late": "42",
        "a fault of the policy": "error: ValueError: no n",
        "a fault of the tool": "error: ValueError: n < 0",
    }
    assert {name: error for name, error in answers.items() if isinstance(error, TimeoutError) != (name in SILENT)} == {}
    for name in (bad.keys() | wrong.keys()) - SILENT:
        assert isinstance(answers[name], ConnectionError)
        assert "MCP server" in str(answers[name])
        assert len(str(answers[name]).splitlines()) == 1
    assert "the answer has more than 2,097,152 bytes" in str(answers["an endless body"])
    assert "the answer is compressed" in str(answers["a compression bomb"])

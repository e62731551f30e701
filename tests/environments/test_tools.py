from __future__ import annotations

import asyncio
import json

import pytest

from realign.environments import Toolbox
from realign.environments.agents import load_agent
from realign.environments.tools import function_tool, load_tools
from realign.errors import ConfigError
from tests.environments import tool_fixtures as fixtures

FIXTURES = "tests.environments.tool_fixtures"


def call(name: str, arguments, *functions) -> str:
    return asyncio.run(
        Toolbox(functions or (fixtures.multiply, fixtures.lookup, fixtures.broken)).call(name, arguments)
    )


def test_the_schema_of_a_function_comes_from_its_hints_and_docstring():
    assert Toolbox([fixtures.multiply]).schemas == [
        {
            "type": "function",
            "function": {
                "name": "multiply",
                "description": "Multiply two integers.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "a": {"type": "integer", "description": "First factor."},
                        "b": {"type": "integer", "description": "Second factor."},
                    },
                    "required": ["a", "b"],
                },
            },
        }
    ]
    lookup = function_tool(fixtures.lookup).schema["function"]["parameters"]
    assert lookup["required"] == ["word"]
    assert lookup["properties"]["language"]["enum"] == ["en", "fr"]


def test_calls_return_text_and_other_values_as_json():
    assert call("multiply", '{"a": 3, "b": 4}') == "12"
    assert call("multiply", {"a": 3, "b": 4}) == "12"
    assert json.loads(call("lookup", '{"word": "un"}')) == {"word": "un", "language": "en"}


@pytest.mark.parametrize(
    ("name", "arguments", "part"),
    [
        ("divide", "{}", "the tools are multiply, lookup, broken"),
        ("multiply", "{", "JSONDecodeError"),
        ("multiply", "[3, 4]", "must be a JSON object"),
        ("multiply", '{"a": 3}', "missing a required argument: 'b'"),
        ("multiply", '{"a": 3, "b": 4, "c": 5}', "unexpected keyword argument 'c'"),
        ("broken", "{}", "RuntimeError: the tool broke"),
    ],
)
def test_a_request_that_cannot_be_served_is_a_text_for_the_policy(name, arguments, part):
    text = call(name, arguments)
    assert text.startswith("error: ")
    assert part in text


@pytest.mark.parametrize("error", [ConnectionError("down"), TimeoutError("late")])
def test_a_tool_that_is_not_reachable_fails_the_episode(error):
    def down() -> None:
        """Fail."""
        raise error

    with pytest.raises(type(error), match=str(error)):
        call("down", "{}", down)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([f"{FIXTURES}:undocumented"], "schema cannot be derived"),
        ([f"{FIXTURES}:NUMBER"], "expected a function"),
        ([f"{FIXTURES}:missing"], "has no 'missing'"),
        ([f"{FIXTURES}:multiply"] * 2, "two tools have the name 'multiply'"),
    ],
)
def test_tools_that_cannot_be_loaded_are_configuration_errors(names, message):
    with pytest.raises(ConfigError, match=message):
        load_tools(names, [])


def test_an_agent_gets_the_tools_of_the_config():
    tools = load_tools([f"{FIXTURES}:multiply", f"{FIXTURES}:lookup"], [])
    agent = load_agent(f"{FIXTURES}:with_tools", {}, tools)()

    async def episode():
        await agent.reset({"base_url": "", "api_key": "", "row": {}}, seed=0)
        return await agent.step(None)

    assert asyncio.run(episode())[1] == 2.0


def test_agents_that_cannot_use_tools_are_configuration_errors():
    tools = load_tools([f"{FIXTURES}:multiply"], [])
    with pytest.raises(ConfigError, match="async def"):
        load_agent(f"{FIXTURES}:plain_with_tools", {}, tools)
    with pytest.raises(ConfigError, match=r"no argument 'tools'"):
        load_agent("tests.environments.agent_fixtures:scripted", {}, tools)
    with pytest.raises(ConfigError, match="without 'tools'"):
        load_agent(f"{FIXTURES}:with_tools", {})

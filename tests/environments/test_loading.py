"""Environments by name, and environments that get the tools of a config: Python functions, and MCP servers (slow)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from realign.api.environment import Response, ToolCall
from realign.environments import EnvironmentPool, Limits, SharedLoop, TurnWriter, load_environment
from realign.environments.loading import load_with_tools, takes_seed
from realign.environments.tools import load_tools
from realign.errors import ConfigError
from tests.environments import environment_fixtures as fixtures
from tests.environments import tool_fixtures
from tests.tiny import tiny_tokenizer

FILE = Path(fixtures.__file__)
MODULE = fixtures.__name__


def test_a_class_is_found_by_module_or_file_and_made_anew_each_time():
    make = load_environment(f"{MODULE}:Tool", {"tag": "a"})
    first, second = make(), make()
    assert isinstance(first, fixtures.Tool)
    assert (first.tag, first is second) == ("a", False)
    assert type(load_environment(f"{FILE}:Tool", {})()).__name__ == "Tool"


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "Tool",
            {},
            r"environment 'Tool': the name must have the form 'package\.module:Class' or 'path/to/file\.py:Class'",
        ),
        (f"{MODULE}:Tol", {}, r"has no 'Tol'; found .*did you mean 'Tool'\?"),
        (f"{MODULE}:function", {}, "is a function; expected a class"),
        (f"{MODULE}:NoStep", {}, r"has no method step\(response\)"),
        (f"{MODULE}:OddStep", {}, r"OddStep\.step' cannot be called as OddStep\.step\(self, response\): too many"),
        (f"{MODULE}:Tool", {"tags": 1}, r"cannot be called as Tool\(tags=\): got an unexpected keyword argument"),
        ("nowhere.at.all:Tool", {}, "no module named 'nowhere'"),
        ("subprocess:Popen", {}, "is in Python's standard library, which contains none"),
    ],
)
def test_what_is_no_environment_is_refused_before_anything_is_loaded(name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        load_environment(name, arguments)


def test_a_seed_is_given_to_those_who_take_one():
    assert takes_seed(fixtures.Tool().reset)
    assert takes_seed(lambda row, **more: None)
    assert not takes_seed(fixtures.Plain().reset)


FIXTURES = tool_fixtures.__name__


@contextmanager
def pool(name: str, functions: list[str], servers: list[str], timeout_s: float = 60) -> Iterator[EnvironmentPool]:
    make = load_with_tools(f"{FIXTURES}:{name}", {}, load_tools(functions, servers))
    with EnvironmentPool(
        name, make, TurnWriter(tiny_tokenizer()), SharedLoop(name, Limits(timeout_s, 8))
    ) as environments:
        yield environments


def calling(name: str, arguments: str) -> Response:
    return Response("", (5,), 0, False, "", (ToolCall(name, arguments),))


def saying(text: str) -> Response:
    return Response(text, (5,), 1, False, text)


def observed(answer) -> str:
    assert answer.step is not None, answer.failure
    return tiny_tokenizer().decode(answer.step.tokens)


@pytest.mark.parametrize("name", ["Given", "PlainReset"])
def test_reset_gets_the_tools_and_steps_call_them(name, monkeypatch):
    kind = getattr(tool_fixtures, name)
    monkeypatch.setattr(kind, "closed", 0)
    with pool(name, [f"{FIXTURES}:multiply"], []) as environments:
        assert [answer.failure for answer in environments.reset([({"start": "go"}, 1), ({"start": "go"}, 2)])] == [
            "",
            "",
        ]
        called = environments.step({0: calling("multiply", '{"a": 3, "b": 4}'), 1: calling("divide", "{}")})
        assert observed(called[0]) == "12"
        assert observed(called[1]).startswith("error: there is no tool")
        ended = environments.step({0: saying("12"), 1: saying("12")})
        assert [answer.step.reward for answer in ended] == [1.0, 0.0]
        assert all(answer.step.over for answer in ended)
    assert kind.closed == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Calling", r"cannot be called as Calling\.reset\(self, row, tools=\)"),
        ("PlainStep", "require an `async def step`"),
        ("Missing", "has no 'Missing'"),
    ],
)
def test_a_class_that_cannot_call_tools_is_a_configuration_error(name, message):
    with pytest.raises(ConfigError, match=message):
        load_with_tools(f"{FIXTURES}:{name}", {}, load_tools([f"{FIXTURES}:multiply"], []))

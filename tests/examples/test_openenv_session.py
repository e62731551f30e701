"""The client of OpenEnv servers, with a fake connection. `test_adapters.py` uses a server."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.environments.adapters.conversations import talk

ROOT = Path(__file__).parents[2]


class Connection:
    """A connection with given answers."""

    def __init__(self, *answers):
        self.answers, self.sent, self.closed = list(answers), [], False

    async def send(self, text):
        self.sent.append(json.loads(text))

    async def recv(self):
        return json.dumps(self.answers.pop(0))

    async def close(self):
        self.closed = True


def observation(text: str, **more) -> dict:
    return {"type": "observation", "data": {"observation": {"text": text}, **more}}


@pytest.fixture
def connect(monkeypatch):
    """Return a function that imports the example, with a module `websockets` that returns a given connection."""

    def install(connection: Connection) -> ModuleType:
        async def connect(url, **options):
            connection.url, connection.options = url, options
            return connection

        monkeypatch.setitem(sys.modules, "websockets", SimpleNamespace(connect=connect))
        monkeypatch.delitem(sys.modules, "examples.openenv_session", raising=False)
        monkeypatch.syspath_prepend(str(ROOT))
        return importlib.import_module("examples.openenv_session")

    return install


def test_a_session_is_the_messages_of_one_connection(connect):
    connection = Connection(
        observation("hello", reward=None, done=False),
        observation("more", reward=0.25, done=False),
        observation("", reward=1.0, done=True),
    )
    example = connect(connection)
    session = example.OpenEnvSession("https://127.0.0.1:8000/", action="code", columns=["level"])
    assert talk(session, "a", "b", row={"level": 3, "answer": 5}, seed=2**31 + 7) == [
        "hello",
        ("more", 0.25, False, False),
        ("", 1.0, True, False),
    ]
    assert connection.url == "wss://127.0.0.1:8000/ws"
    assert connection.options["max_size"] == example.LARGEST_ANSWER
    assert connection.sent == [
        {"type": "reset", "data": {"seed": 7, "level": 3}},
        {"type": "step", "data": {"code": "a"}},
        {"type": "step", "data": {"code": "b"}},
    ]
    assert connection.closed

"""Environments of OpenEnv servers, over their WebSocket protocol.

    pip install websockets
    realign experiment=grpo_environment models.actor.path=MODEL data.path=rows.jsonl \
        interfaces.agent.environment=examples/openenv_session.py:OpenEnvSession \
        '+interfaces.agent.arguments={base_url: "http://127.0.0.1:8000", action: message, observation: text}'

The package `openenv` runs the server, in a separate Python environment: its dependencies exclude current releases of
other packages. Works with servers of openenv and of its predecessor openenv-core. `adapters.py openenv` trains with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import websockets

from realign.api.environment import Response

LARGEST_ANSWER = 64 * 2**20
"""Bytes that a message of the server may have. Larger ones could fill the memory of the run; the episode fails."""


class OpenEnvSession:
    """A session of an OpenEnv server. Its methods are coroutines.

    Args:
        base_url: address of the server, such as `http://127.0.0.1:8000`. It must allow as many sessions at a time
            as `interfaces.agent.concurrency` (`max_concurrent_envs` of `create_app`).
        action: field of the action that contains the text of the policy.
        observation: field of an observation that the policy reads.
        columns: columns of the row that `reset` of the server gets, besides the seed.
    """

    def __init__(
        self, base_url: str, action: str = "message", observation: str = "text", columns: Sequence[str] = ()
    ) -> None:
        self._url = base_url.replace("http", "ws", 1).rstrip("/") + "/ws"
        self._action, self._observation, self._columns = action, observation, columns
        self._socket: Any = None

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> tuple[str, dict[str, Any]]:
        """Open a session, and start its episode."""
        local = urlsplit(self._url).hostname in ("localhost", "127.0.0.1", "::1")
        self._socket = await websockets.connect(self._url, max_size=LARGEST_ANSWER, proxy=None if local else True)
        answer = await self._call("reset", {"seed": seed % 2**31} | {name: row[name] for name in self._columns})
        return self._text(answer), {}

    async def step(self, response: Response) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Send the text of the policy as an action."""
        answer = await self._call("step", {self._action: response.text})
        return self._text(answer), float(answer.get("reward") or 0.0), bool(answer.get("done")), False, {}

    async def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            await self._socket.close()

    async def _call(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send a message, and return the data of the answer.

        Raises:
            ValueError: the server answers with an error.
        """
        await self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await self._socket.recv())
        if answer.get("type") == "error":
            raise ValueError(f"the OpenEnv server answered {answer.get('data')}")
        return dict(answer["data"])

    def _text(self, answer: Mapping[str, Any]) -> str:
        return str(answer["observation"][self._observation])

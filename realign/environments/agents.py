"""Agents: programs that call the policy over HTTP, as environments whose only step runs the whole program.

An agent is a Python function, `async def` or `def`, or a command. It gets the base URL and the key of an
OpenAI-compatible endpoint, and returns a reward. `EnvironmentPool` runs agents under the same limits as environments.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import IO, Any

from realign.api.environment import Environment, Response
from realign.environments.calls import Step, finite_reward, read_step
from realign.environments.loading import takes_seed
from realign.environments.tools import ToolSources
from realign.environments.turns import abbreviate
from realign.errors import ConfigError
from realign.rewards.pool.binding import named_arguments
from realign.rewards.pool.functions import is_async, load_object
from realign.secrets import without_secrets

START = Response("", (), 0, False)
"""The response that starts an agent."""
BASE_URL, API_KEY = "OPENAI_BASE_URL", "OPENAI_API_KEY"
"""Environment variables of a command, which OpenAI clients read."""
ENDPOINT = ("base_url", "api_key", "row")
"""Arguments of an agent, which it gets by name."""
_REWARDS = "rewards"
"""Key of the rewards of roles, in the result of an agent and in the info of its step."""
_OUTPUT = 1 << 16
"""Number of bytes at the end of a command's output that are read."""
_FORMS = "'package.module:function' or 'path/to/file.py:function'"

Outcome = tuple[str, Any, bool, bool, Mapping[str, Any]]


def task(base_url: str, api_key: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the argument of `reset` for an agent: its endpoint, and its row of the dataset."""
    return {"base_url": base_url, "api_key": api_key, "row": row}


def load_agent(name: str, arguments: Mapping[str, Any], tools: ToolSources | None = None) -> Callable[[], Environment]:
    """Return a factory of environments that run the function `name` with these keyword arguments.

    Args:
        name: name of the function.
        arguments: its keyword arguments.
        tools: tools that every episode opens, and passes as the parameter `tools` (`Toolbox`).

    Raises:
        ConfigError: the function does not exist, or does not accept the arguments, or `tools` are given and it is no
            `async def`.
    """
    program = load_object(name, "agent", _FORMS)
    if isinstance(program, type) or not callable(program):
        raise ConfigError(f"agent {name!r} is a {type(program).__name__}; expected a function.")
    opened = [] if tools is None else ["tools"]
    seeded = ["seed"] if takes_seed(program) and "seed" not in arguments else []
    names = named_arguments(program, f"agent {name!r}", [*ENDPOINT, *seeded, *opened, *arguments])
    if unknown := next((given for given in (*opened, *arguments) if given not in names), None):
        raise ConfigError(f"agent {name!r} has no argument {unknown!r}.")
    function = partial(program, **arguments)
    if tools is not None and not is_async(program):
        raise ConfigError(f"agent {name!r}: tools and mcp require an `async def`, since calls of tools are awaited.")
    agent: Any = partial(_AsyncAgent, tools=tools) if is_async(program) else _PlainAgent
    return partial(agent, function, names)


def load_command(command: Sequence[str], keep_environment: Sequence[str]) -> Callable[[], Environment]:
    """Return a factory of environments that run a command.

    The command gets the endpoint in `OPENAI_BASE_URL` and `OPENAI_API_KEY`, and the row as JSON on stdin. It prints the
    reward as the last line of stdout: a number, or a JSON object with the key `reward`.

    Args:
        command: program and arguments; no shell interprets them.
        keep_environment: environment variables that look like secrets but are passed on.
    """
    return partial(_AsyncAgent, partial(_run_command, tuple(command), tuple(keep_environment)), ENDPOINT)


class _Agent:
    """An agent as an environment: `reset` stores its task, and `step` runs it."""

    def __init__(self, function: Callable[..., Any], names: Collection[str]) -> None:
        self._function, self._names = function, names

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> tuple[str, dict[str, Any]]:
        """Store the task (`task`)."""
        given = {**row, "seed": seed}
        self._call = partial(self._function, **{name: given[name] for name in self._names if name in given})
        return "", {}


class _AsyncAgent(_Agent):
    def __init__(self, function: Callable[..., Any], names: Collection[str], tools: ToolSources | None = None) -> None:
        super().__init__(function, names)
        self._tools = tools

    async def step(self, response: Response) -> Outcome:
        """Run the agent on the event loop."""
        if self._tools is None:
            return outcome(await self._call())
        async with self._tools.open() as tools:
            return outcome(await self._call(tools=tools))


class _PlainAgent(_Agent):
    def step(self, response: Response) -> Outcome:
        """Run the agent in a thread."""
        return outcome(self._call())


def outcome(returned: Any) -> Outcome:
    """Return the result of `step` for the return value of an agent: a reward, or a mapping with the key `reward`.

    A reward is a number, or a list with a number for each call of the policy. With roles, the mapping has the key
    `rewards`, a mapping of roles to rewards.

    Raises:
        ValueError: a mapping has other keys than `reward` or `rewards`, and `truncated`.
    """
    if not isinstance(returned, Mapping):
        returned = {"reward": returned}
    key = _REWARDS if _REWARDS in returned else "reward"
    if key not in returned or (unknown := set(returned) - {key, "truncated"}):
        wrong = "has no key 'reward'" if key not in returned else f"has the unknown key {min(unknown, key=str)!r}"
        raise ValueError(f"the agent returned {abbreviate(returned)}, which {wrong}")
    truncated = returned.get("truncated", False)
    rewards = returned[_REWARDS] if key == _REWARDS else {"": returned["reward"]}
    single = 0.0 if key == _REWARDS or isinstance(returned["reward"], list | tuple) else returned["reward"]
    return "", single, truncated is False, truncated, {_REWARDS: rewards}


def read_outcome(roles: Sequence[str], returned: Any, tokens: Callable[[Any], Sequence[int]]) -> Step:
    """Check the result of an agent's step.

    Args:
        roles: names of the roles of the episode; empty: it has none.
        returned: result of the step.
        tokens: encodes observations.

    Raises:
        ValueError: a reward is invalid, or the agent returned the rewards of other roles.
    """
    step = read_step(returned, tokens)
    rewards = returned[4][_REWARDS]
    if not isinstance(rewards, Mapping) or set(rewards) != set(roles or [""]):
        expected = f"the key 'rewards' with a reward for each of {', '.join(roles)}" if roles else "one reward"
        raise ValueError(f"the agent returned the rewards {abbreviate(rewards)}, expected {expected}")
    lists = {role: [finite_reward(x) for x in xs] for role, xs in rewards.items() if isinstance(xs, list | tuple)}
    totals = {role: sum(lists[role]) if role in lists else finite_reward(x) for role, x in rewards.items()}
    return replace(step, reward=totals.get("", 0.0), role_rewards=totals, call_rewards=lists)


async def _run_command(
    command: Sequence[str], keep_environment: Sequence[str], base_url: str, api_key: str, row: Mapping[str, Any]
) -> Any:
    """Run a command in a separate process group, which is killed when the command ends or is canceled.

    Raises:
        ValueError: the command fails, or prints no reward.
    """
    environment = {**without_secrets(os.environ, keep_environment), BASE_URL: base_url, API_KEY: api_key}
    # Files, since nobody reads the output before the end: a full pipe would block the command.
    with tempfile.TemporaryFile() as rows, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        rows.write(json.dumps(row, default=str).encode())
        rows.seek(0)
        process = await asyncio.create_subprocess_exec(
            *command, stdin=rows, stdout=out, stderr=err, env=environment, start_new_session=True
        )
        try:
            code = await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        printed = _end(out)
        if code:
            raise ValueError(f"the command {command[0]!r} ended with exit code {code}: {_end(err) or printed}")
    lines = printed.splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError) as error:
        raise ValueError(f"the command {command[0]!r} printed no reward as its last line: {printed!r}") from error


def _end(file: IO[bytes]) -> str:
    """Return the end of a file as text."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _OUTPUT))
    return file.read().decode(errors="replace").strip()

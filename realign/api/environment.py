"""`Environment`: the contract of environments for multi-turn rollout, with asynchronous gymnasium methods.

An environment instance serves one episode. `reset` starts the episode, and then the policy and `step` alternate. The
policy produces a `Response`, and the environment an `Observation`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

Observation: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids (used unchanged), or chat messages (`role`, `content`) for the tokenizer's chat template."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that the policy requests."""

    name: str
    arguments: str
    """Arguments as JSON text."""


@dataclass(frozen=True)
class Response:
    """One turn of the policy.

    Attributes:
        text: sampled text, without special tokens.
        token_ids: sampled tokens, including the end token; the policy trains on them.
        turn: index of the turn, from 0.
        truncated: whether the turn ended at `max_new_tokens` instead of an end token.
        content: `text` without reasoning and tool calls, if there is a response template; otherwise `text`.
        tool_calls: calls of tools, if there is a response template.
        reasoning: reasoning, if there is a response template and the turn has any.
    """

    text: str
    token_ids: tuple[int, ...]
    turn: int
    truncated: bool
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None


class EpisodeFailure(StrEnum):
    """Why an environment or an agent failed in an episode. The key `failure` [S] has its place from 1, 0: none."""

    timeout = "timeout"
    """A call took longer than `timeout_s`, or raised `TimeoutError`, as a tool does whose server doesn't answer."""
    exception = "exception"
    """A call raised, or returned something invalid."""
    blocked = "blocked"
    """A call, of any episode, blocked the event loop of all of them."""
    infrastructure = "infrastructure"
    """A call raised `ConnectionError` or `realign.errors.TransientError`: a service that it uses is not reachable."""


class Environment(Protocol):
    """One episode. The config names a class, and the runtime constructs an instance for every episode.

    Methods may also be plain functions, which run in threads. Use plain functions for blocking code, since the
    coroutines of all environments share one event loop. If there is a method `close()`, the runtime calls it once at
    the end of the episode, also after a failure. If there is a class method `check(**arguments)`, the runtime calls it
    once with the arguments of the class before the run starts, and any error ends the run.
    """

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> tuple[Observation, Mapping[str, Any]]:
        """Start the episode.

        Args:
            row: row of the dataset with the episode's prompt.
            seed: seed for random choices, derived from the run, the prompt and the episode's index. The signature may
                omit it.

        Returns:
            Text or token ids to append to the prompt ("" for none), and an info, which is ignored.
        """
        ...

    async def step(self, response: Response) -> tuple[Observation, float, bool, bool, Mapping[str, Any]]:
        """Process the policy's turn.

        Returns:
            Observation before the policy's next turn, reward of this turn, terminated, truncated, and an info, which
            is ignored. The observation of the last step is not added to the sequence, since no token is sampled after
            it.
        """
        ...

"""`Environment`: what a policy converses with. The methods and the five values are gymnasium's, awaitable.

An environment lives for one episode. `reset` begins it, and then the policy and `step` take turns. What the policy says
is a `Response`; what the environment says is an `Observation`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

Observation: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text; or token ids, taken as they are; or chat messages (`role`, `content`) for the tokenizer's chat template."""


@dataclass(frozen=True)
class Response:
    """One turn of the policy.

    Attributes:
        text: what was sampled, without special tokens.
        token_ids: the same as tokens, the end token included; this is what trains.
        turn: number of the turn, from 0.
        truncated: the turn ended at `max_new_tokens`, not at an end token.
    """

    text: str
    token_ids: tuple[int, ...]
    turn: int
    truncated: bool


class Environment(Protocol):
    """One episode. A class is named in the config, and an instance of it is made for every episode.

    Its methods may also be plain functions, which run in threads: use these for code that blocks, since coroutines of
    all environments share one event loop. A method `close()`, where there is one, is called
    once when the episode is over, however it ended.
    """

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> tuple[Observation, Mapping[str, Any]]:
        """Begin the episode.

        Args:
            row: the row of the dataset whose prompt the policy has read.
            seed: for whatever is random here; a pure function of the run, the prompt and the episode's number. May be
                left out of the signature.

        Returns:
            What follows the prompt ("" where the prompt says it all; text or token ids), and an info, which is not
            read.
        """
        ...

    async def step(self, response: Response) -> tuple[Observation, float, bool, bool, Mapping[str, Any]]:
        """Take the policy's turn.

        Returns:
            The observation that the policy reads before its next turn; the reward of this turn; whether the episode is
            over (terminated), or cut off (truncated); and an info, which is not read. The observation of the last step
            becomes no part of the sequence, since nothing is sampled after it.
        """
        ...


__all__ = ["Environment", "Observation", "Response"]

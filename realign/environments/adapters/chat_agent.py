"""Any environment as an agent that holds a chat with the policy (needs the extras `serve` and `judge`).

`EnvironmentInterface` cannot add the first observation to a prompt that the chat template has formatted. Here each
observation is a message, and the endpoint formats the conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from realign.api.environment import Response
from realign.environments.adapters import import_optional
from realign.environments.calls import result_of
from realign.environments.loading import load_environment, takes_seed
from realign.environments.turns import split_observation


async def play(
    base_url: str,
    api_key: str,
    row: Mapping[str, Any],
    *,
    environment: str,
    seed: int,
    arguments: Mapping[str, Any] | None = None,
    max_turns: int = 16,
) -> dict[str, Any]:
    """Play an episode, and return the sum of its rewards.

    Args:
        base_url: base URL of the endpoint.
        api_key: key of the episode.
        row: row of the dataset; the first message is its column `prompt`, followed by the first observation.
        environment: environment class, as in `EnvironmentInterface`.
        seed: seed of the environment.
        arguments: keyword arguments of the class.
        max_turns: number of turns after which the episode is truncated.
    """
    openai = import_optional("openai", extra="judge", user=__name__)
    world: Any = load_environment(environment, arguments or {})()
    http = openai.DefaultAsyncHttpxClient(verify=False)  # loads no certificates, since the endpoint is on this machine
    try:
        seeded = {"seed": seed} if takes_seed(world.reset) else {}
        observation, _ = await result_of(partial(world.reset, row, **seeded))
        conversation, total = _messages(observation, row["prompt"]), 0.0
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http, max_retries=0) as client:
            for turn in range(max_turns):
                answer = await client.chat.completions.create(model="policy", messages=conversation)
                reply, cut = answer.choices[0].message.content or "", answer.choices[0].finish_reason == "length"
                outcome = await result_of(partial(world.step, Response(reply, (), turn, cut)))
                observation, reward, terminated, truncated, _ = outcome
                total += float(reward)
                if terminated or truncated:
                    return {"reward": total, "truncated": bool(truncated and not terminated)}
                conversation += [{"role": "assistant", "content": reply}, *_messages(observation)]
        return {"reward": total, "truncated": True}
    finally:
        if callable(close := getattr(world, "close", None)):
            await result_of(close)


def _messages(observation: Any, before: str = "") -> list[dict[str, Any]]:
    """Return an observation as messages; text becomes one message of the user."""
    text, ids, messages = split_observation(observation)
    if ids is not None:
        raise ValueError("the observation contains token ids, which a chat cannot send")
    opening = [{"role": "user", "content": before + text}] if before or not messages else []
    return [*opening, *map(dict, messages)]

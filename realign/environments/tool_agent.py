"""`chat`: an agent that answers a question with tools. It calls the policy until the policy requests no tool."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import httpx2

from realign.cells import read_column
from realign.environments.calls import result_of
from realign.environments.tools import Toolbox
from realign.errors import ConfigError
from realign.rewards.pool.binding import Scored, bind
from realign.rewards.pool.functions import load_function

_LIMITS = ("context_length_exceeded", "max_calls_exceeded")
"""Errors of the endpoint that truncate an episode."""


async def chat(
    base_url: str,
    api_key: str,
    row: Mapping[str, Any],
    *,
    tools: Toolbox,
    reward: str,
    prompt: str = "prompt",
    system: str = "",
    max_turns: int = 8,
) -> dict[str, Any]:
    """Run one episode.

    Args:
        base_url: base URL of the endpoint.
        api_key: key of the episode.
        row: row of the dataset.
        tools: tools of the episode.
        reward: reward function for one response, `(prompt, response, row)`. The response is the last answer.
        prompt: column with the question: text, or chat messages.
        system: system message; empty for none.
        max_turns: maximum number of answers of the policy. An episode without a last answer is truncated.

    Raises:
        ConfigError: the reward function does not exist, or does not score one response.
        ValueError: the endpoint or the reward function failed.
    """
    score_of = load_function(reward)
    binding = bind(score_of, reward)
    if binding.returns_list or binding.token_ids:
        raise ConfigError(f"reward={reward}: expected a function of one response, such as (prompt, response, row).")
    question = read_column(row, prompt)
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
    answer, ended = "", False
    headers = {"Authorization": f"Bearer {api_key}"}
    # No timeout, since the episode has one. No certificates to load, since the endpoint is on this machine.
    async with httpx2.AsyncClient(base_url=base_url, headers=headers, timeout=None, verify=False) as client:
        for _ in range(max_turns):
            reply = await _ask(client, messages, tools)
            if reply is None:
                break
            messages.append(reply)
            answer = reply.get("content") or ""
            if not (calls := reply.get("tool_calls")):
                ended = True
                break
            for call in calls:
                function = call["function"]
                text = await tools.call(function["name"], function["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "name": function["name"], "content": text})
    shown = question if isinstance(question, str) else str(question[-1]["content"])
    if missing := binding.describe_missing([row]):
        raise ValueError(f"reward={reward}: {missing}")
    arguments, keywords = binding.arguments([Scored(shown, answer, row)])
    score = await result_of(partial(score_of, *arguments, **keywords))
    if isinstance(score, Mapping):
        score = score.get(binding.convention.result)
    if score is None:
        raise ValueError(f"reward={reward}: the function returned no reward")
    return {"reward": score, "truncated": not ended}


async def _ask(client: httpx2.AsyncClient, messages: list[Any], tools: Toolbox) -> dict[str, Any] | None:
    """Return the next answer of the policy; None if a limit of the episode is reached."""
    body = {"model": "policy", "messages": messages, "tools": tools.schemas}
    answer = await client.post("chat/completions", json=body)
    if answer.is_success:
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return {name: value for name, value in message.items() if value is not None}
    if answer.json().get("error", {}).get("code") in _LIMITS:
        return None
    raise ValueError(f"the endpoint answered with status {answer.status_code}: {answer.text}")

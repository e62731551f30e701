"""Environments as agents: the endpoint of a tiny model."""

from __future__ import annotations

from dataclasses import replace

from tests.environments.environment_fixtures import Tool
from tests.interfaces.agent_play import batch, lists, play, settings, tokenizer

PLAY = "realign.environments.adapters.chat_agent:play"
TOOL = "tests.environments.environment_fixtures:Tool"


def chat(row: dict, **changes):
    """Play an episode of the scripted environment, and return its batch."""
    Tool.made.clear()
    arguments = {"environment": TOOL, "max_turns": 3, **changes}
    agent = replace(settings(), agent=PLAY, arguments=arguments, max_failed_fraction=1.0)
    return play(agent, batch([{"prompt": "ab", **row}]))


def test_observations_are_messages_of_one_sequence_and_rewards_are_summed():
    script = [("7", 0.25, False, False, {}), ([{"role": "user", "content": "no"}], 0.0, False, False, {})]
    out = chat({"opening": "cd", "script": [*script, ("", 0.5, True, False, {})]})
    assert (out["rewards"].tolist(), out["turns"].tolist()) == ([0.75], [3])
    ids, sampled = lists(out, "input_ids")[0], lists(out, "loss_mask")[0]
    given = tokenizer().decode([i for i, own in zip(ids, sampled, strict=True) if not own])
    assert given.replace("<eos>", "") == "abcd7no"
    assert [response.turn for response in Tool.made[-1].heard] == [0, 1, 2]
    assert Tool.made[-1].closed == 1


def test_an_episode_that_does_not_end_is_truncated():
    script = [("7", 0.25, False, False, {})] * 3
    out = chat({"script": script}, max_turns=2)
    assert (out["rewards"].tolist(), out["turns"].tolist(), out["truncated"].tolist()) == ([0.5], [2], [True])

"""Environments of gymnasium as text, with the package (slow)."""

from __future__ import annotations

import pytest

from realign.environments import load_environment
from realign.environments.adapters.gymnasium_text import GymnasiumText
from realign.errors import ConfigError
from tests.environments.adapters.conversations import talk

pytestmark = pytest.mark.slow
gymnasium = pytest.importorskip("gymnasium", reason="needs the extra gymnasium")
LAKE = {"id": "FrozenLake-v1", "arguments": {"desc": ["SF", "HG"], "is_slippery": False}}
MOVES = ["left", "down", "right", "up"]


def test_texts_are_actions_and_observations_are_text():
    assert talk(GymnasiumText(**LAKE, actions=MOVES), "right", " down\n") == [
        "0\n",
        ("1\n", 0.0, False, False),
        ("3\n", 1.0, True, False),
    ]
    assert talk(GymnasiumText(**LAKE, template="field {observation}"), "1")[1] == ("field 2", 0.0, True, False)
    assert talk(GymnasiumText(**LAKE, actions={"go": 2}), "go")[1] == ("1\n", 0.0, False, False)


def test_a_text_that_is_no_action_ends_the_episode_or_gets_an_answer():
    assert talk(GymnasiumText(**LAKE, actions=MOVES), "jump")[1] == ("", 0.0, True, False)
    polite = GymnasiumText(**LAKE, actions=MOVES, invalid="left, down, right or up?\n")
    assert talk(polite, "jump", "right")[1:] == [
        ("left, down, right or up?\n", 0.0, False, False),
        ("1\n", 0.0, False, False),
    ]


def test_equal_seeds_start_and_continue_equally():
    slippery = {"id": "FrozenLake-v1", "actions": MOVES}
    walks = [talk(GymnasiumText(**slippery), *["down"] * 4, seed=seed) for seed in (5, 5, 6, 7, 8)]
    assert walks[0] == walks[1]
    assert len({str(walk) for walk in walks}) > 1


def test_an_environment_that_cannot_be_text_is_an_error_before_the_run():
    with pytest.raises(ConfigError, match=r"has the action space Box\(.*Set actions"):
        load_environment("realign.environments.adapters.gymnasium_text:GymnasiumText", {"id": "Pendulum-v1"})
    with pytest.raises(gymnasium.error.Error, match="NoSuchLake"):
        load_environment("realign.environments.adapters.gymnasium_text:GymnasiumText", {"id": "NoSuchLake-v1"})

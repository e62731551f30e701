"""Games of TextArena, with the package (slow)."""

from __future__ import annotations

import importlib

import pytest

from tests.environments.adapters.conversations import talk

pytestmark = pytest.mark.slow
pytest.importorskip("textarena", reason="needs the package textarena")
TextArenaGame = importlib.import_module("examples.textarena_game").TextArenaGame
GUESS = {"id": "GuessTheNumber-v0", "arguments": {"min_number": 1, "max_number": 7, "max_turns": 3}}


def secret(seed: int) -> int:
    """Return the number of a game."""
    over = [talk(TextArenaGame(**GUESS), f"[{n}]", seed=seed)[1][2] for n in range(1, 8)]
    assert sum(over) == 1
    return over.index(True) + 1


def test_the_policy_reads_the_rules_and_then_only_what_is_new():
    number = secret(3)
    wrong = 1 if number != 1 else 2
    opening, answer = talk(TextArenaGame(**GUESS), f"[{wrong}]", seed=3)
    assert opening.startswith("You are Player 0. You are playing Guess The Number.")
    assert answer == ("The target number is higher.\n", 0.0, False, False)
    assert talk(TextArenaGame(**GUESS, rules=False), seed=3) == [""]


def test_the_reward_of_the_game_is_that_of_the_last_turn():
    number = secret(4)
    assert talk(TextArenaGame(**GUESS), f"[{number}]", seed=4)[1] == ("", 1.0, True, False)
    invalid = talk(TextArenaGame(**GUESS), "nothing", "nothing", seed=4)
    assert "attempted an invalid move" in invalid[1][0]
    assert invalid[2][1:] == (0.0, True, False)

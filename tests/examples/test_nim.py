"""The game of the self-play example: its rules, and perfect play."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path

import pytest


@pytest.fixture
def game(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    return importlib.import_module("self_play")


def player(*moves: str):
    """Return a player with given moves."""
    waiting = list(moves)

    async def move(sticks: int) -> str:
        return waiting.pop(0)

    return move


@pytest.mark.parametrize(
    ("first", "second", "winner"),
    [
        (["3", "3"], ["1"], 0),
        (["2", "1"], ["3", "1"], 1),
        (["4"], [], 1),
        (["0"], [], 1),
        (["one"], [], 1),
        (["3", "3"], ["2"], 1),  # more than there are
    ],
)
def test_the_last_stick_wins_and_an_invalid_move_loses(first, second, winner, game):
    assert asyncio.run(game.play(7, [player(*first), player(*second)])) == winner


def test_perfect_play_wins_every_game_that_can_be_won(game):
    async def careless(sticks: int) -> str:
        return "1"

    for sticks in range(1, game.LARGEST + 1):
        first = asyncio.run(game.play(sticks, [game.perfect, game.perfect]))
        assert (first == 0) == bool(sticks % 4)
        if sticks % 4:
            assert asyncio.run(game.play(sticks, [game.perfect, careless])) == 0

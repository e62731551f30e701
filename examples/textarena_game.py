"""Games of TextArena for one player.

    pip install textarena
    realign experiment=grpo_environment models.actor.path=MODEL data.path=rows.jsonl \
        interfaces.agent.environment=examples/textarena_game.py:TextArenaGame \
        '+interfaces.agent.arguments={id: GuessTheNumber-v0}'

Some games, such as Wordle and Hangman, download word lists when they're imported. `adapters.py textarena` trains on a
game.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import textarena

from realign.api.environment import Response

_GLOBAL_RANDOM = threading.Lock()


class TextArenaGame:
    """A game, reproducible by its seed. Its methods run in threads.

    TextArena draws from Python's global random numbers. Each game here has its own random state, which replaces
    the global state during a call.

    Args:
        id: id of the game, such as `GuessTheNumber-v0`. Wrappers that repeat earlier observations have no effect.
        arguments: keyword arguments of `textarena.make`.
        rules: whether the first observation contains the rules; false: the prompt of the row explains the game.
    """

    def __init__(self, id: str, arguments: Mapping[str, Any] | None = None, rules: bool = True) -> None:
        self._random = random.Random(id).getstate()
        with self._own_random():
            self._game = textarena.make(id, **(arguments or {}))
        self._hidden = set() if rules else {textarena.ObservationType.PROMPT}

    @classmethod
    def check(cls, **arguments: Any) -> None:
        """Construct the game once, before the run starts."""
        cls(**arguments)

    def reset(self, row: Mapping[str, Any], *, seed: int) -> tuple[str, dict[str, Any]]:
        """Start the game."""
        self._random = random.Random(seed).getstate()
        with self._own_random():
            self._game.reset(num_players=1)
        return self._observed(), {}

    def step(self, response: Response) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Make a move. The reward is that of TextArena, at the end of the game."""
        with self._own_random():
            over, _ = self._game.step(action=response.text)
        reward = self._game.close()[0][0] if over else 0.0
        return self._observed(), float(reward), bool(over), False, {}

    def _observed(self) -> str:
        """Return what the game has written since the last call, without the moves of the player."""
        messages = self._game.state.get_current_player_observation()
        return "".join(f"{text}\n" for sender, text, kind in messages if sender != 0 and kind not in self._hidden)

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        with _GLOBAL_RANDOM:
            outside = random.getstate()
            random.setstate(self._random)
            try:
                yield
            finally:
                self._random = random.getstate()
                random.setstate(outside)

"""OpenEnv server for `adapters.py`: find a number from 1 to 7 in three guesses. It runs in the environment of OpenEnv.

The argument is the port.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

NUMBERS, GUESSES = 7, 3


class Guess(Action):
    """A guess as text."""

    message: str


class Hint(Observation):
    """The answer to a guess."""

    text: str = ""


class GuessEnvironment(Environment):
    """A game. Each session has its own."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Hint:
        """Draw the number."""
        self._secret, self._state = random.Random(seed).randint(1, NUMBERS), State(episode_id=episode_id)
        return Hint()

    def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Hint:
        """Compare a guess with the number."""
        self._state.step_count += 1
        right = action.message == str(self._secret)
        over = right or not action.message.isdecimal() or self._state.step_count == GUESSES
        hint = "" if over else "higher\n" if self._secret > int(action.message) else "lower\n"
        return Hint(text=hint, reward=float(right), done=over)

    @property
    def state(self) -> State:
        """State of the episode."""
        return self._state


if __name__ == "__main__":
    app = create_app(GuessEnvironment, Guess, Hint, env_name="guess", max_concurrent_envs=1024)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")

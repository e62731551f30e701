"""Environments of gymnasium as text (needs the extra `gymnasium`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from realign.api.environment import Response
from realign.environments.adapters import import_optional
from realign.errors import ConfigError

_MARKED = re.compile(r"\x1b\[[\d;]*m(.*?)\x1b\[0m", re.DOTALL)
"""Text between two color codes of a terminal, which mark a position."""


class GymnasiumText:
    """An environment of gymnasium whose observations and actions are text. Its methods run in threads.

    Args:
        id: id of the environment, such as `FrozenLake-v1`. `module:Name-v0` imports the module that registers it.
        arguments: keyword arguments of `gymnasium.make`.
        actions: texts of the actions 0, 1, ..., or a mapping of texts to actions. None: the text itself in a `Text`
            space, and an integer in a `Discrete` space.
        screen: whether the observation is the text that `render` returns, in which `[...]` encloses colored text;
            false: `str` of the observation.
        template: format of an observation, with `{observation}`.
        invalid: observation after a text that is no action. None: such a text ends the episode.
    """

    def __init__(
        self,
        id: str,
        arguments: Mapping[str, Any] | None = None,
        actions: Mapping[str, Any] | list[str] | None = None,
        screen: bool = False,
        template: str = "{observation}\n",
        invalid: str | None = None,
    ) -> None:
        gymnasium = import_optional("gymnasium", extra="gymnasium", user=type(self).__name__)
        self._world = gymnasium.make(id, **{"render_mode": "ansi"} if screen else {}, **(arguments or {}))
        space, named = self._world.action_space, actions
        if isinstance(named, list):
            named = {word: action for action, word in enumerate(named)}
        elif named is None and isinstance(space, gymnasium.spaces.Discrete):
            named = {str(action): action for action in range(int(space.start), int(space.start + space.n))}
        elif named is None and not isinstance(space, gymnasium.spaces.Text):
            raise ConfigError(f"environment {id!r} has the action space {space}. Set actions, a mapping of texts.")
        self._named: Mapping[str, Any] | None = named
        self._screen, self._template, self._invalid = screen, template, invalid

    @classmethod
    def check(cls, **arguments: Any) -> None:
        """Construct the environment once, before the run starts."""
        cls(**arguments).close()

    def reset(self, row: Mapping[str, Any], *, seed: int) -> tuple[str, dict[str, Any]]:
        """Start the episode. The column `options` of the row, if any, is passed to gymnasium."""
        observation, _ = self._world.reset(seed=seed % 2**31, options=row.get("options"))
        return self._format(observation), {}

    def step(self, response: Response) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take the action that the text names."""
        text = response.text.strip()
        if text not in self._named if self._named is not None else not self._world.action_space.contains(text):
            return self._invalid or "", 0.0, self._invalid is None, False, {}
        action = text if self._named is None else self._named[text]
        observation, reward, terminated, truncated, _ = self._world.step(action)
        return self._format(observation), float(reward), bool(terminated), bool(truncated), {}

    def close(self) -> None:
        """Close the environment."""
        self._world.close()

    def _format(self, observation: Any) -> str:
        shown = _MARKED.sub(r"[\1]", self._world.render()) if self._screen else observation
        return self._template.format(observation=shown)

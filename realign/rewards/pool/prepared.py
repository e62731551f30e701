"""`Prepared`: reward functions that examine the machine or their server once per run, before the run loads a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class Prepared(ABC):
    """Base class of reward functions that the pool prepares in the process of the run.

    Workers receive the result as a pickle, so they must be able to import its class by the name of its module.
    """

    @abstractmethod
    def prepared(self) -> Prepared:
        """Return the function that the workers call.

        Raises:
            ConfigError: the machine lacks what the settings require.
            TransientError: a server that the function needs does not accept connections.
        """

    @property
    @abstractmethod
    def note(self) -> str:
        """What `prepared` found, for the launch table; empty for nothing to say."""

    @abstractmethod
    def __call__(self, prompt: str, response: str, row: dict[str, Any]) -> Any:
        """Return the reward of one response, or None; can be an `async def`."""

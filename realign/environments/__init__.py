"""Conversations with environments: load an environment class, run many instances concurrently, encode observations."""

from realign.environments.calls import Answer
from realign.environments.environment_pool import EnvironmentPool, Failures
from realign.environments.episode import Episode
from realign.environments.event_loops import Limits, SharedLoop
from realign.environments.loading import load_environment
from realign.environments.tools import Tool, Toolbox
from realign.environments.turns import TurnWriter

__all__ = [
    "Answer",
    "EnvironmentPool",
    "Episode",
    "Failures",
    "Limits",
    "SharedLoop",
    "Tool",
    "Toolbox",
    "TurnWriter",
    "load_environment",
]

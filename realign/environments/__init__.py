"""Conversations with environments: load an environment class, run many instances concurrently, encode observations."""

from realign.environments.asker import Answer, Limits, Slots
from realign.environments.environment_pool import EnvironmentPool, Failures
from realign.environments.episode import Episode
from realign.environments.event_loops import EnvironmentFailure
from realign.environments.loading import load_environment
from realign.environments.tools import Tool, Toolbox, function_tool
from realign.environments.turns import TurnWriter

__all__ = [
    "Answer",
    "EnvironmentFailure",
    "EnvironmentPool",
    "Episode",
    "Failures",
    "Limits",
    "Slots",
    "Tool",
    "Toolbox",
    "TurnWriter",
    "function_tool",
    "load_environment",
]

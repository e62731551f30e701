"""Conversations with environments: finding an environment, asking many at once, writing what they say as tokens."""

from realign.environments.asking import Answer, Limits
from realign.environments.episode import Episode
from realign.environments.failures import EnvironmentFailure, Failures
from realign.environments.loading import load_environment
from realign.environments.slots import Slots
from realign.environments.turns import TurnWriter
from realign.environments.worlds import Worlds

__all__ = [
    "Answer",
    "EnvironmentFailure",
    "Episode",
    "Failures",
    "Limits",
    "Slots",
    "TurnWriter",
    "Worlds",
    "load_environment",
]

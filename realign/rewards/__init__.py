"""Reward functions, and the process pool that runs them. Imports no torch: a worker process starts with this."""

from realign.rewards.arithmetic import exact_answer
from realign.rewards.functions import RewardFunction, load_function
from realign.rewards.pool import Failure, RewardPool, RewardResults
from realign.rewards.processes import RewardError
from realign.rewards.worker import FailureKind

__all__ = [
    "Failure",
    "FailureKind",
    "RewardError",
    "RewardFunction",
    "RewardPool",
    "RewardResults",
    "exact_answer",
    "load_function",
]

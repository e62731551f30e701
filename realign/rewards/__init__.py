"""Reward functions and the process pool that runs them. Does not import torch, so worker processes start fast."""

from realign.errors import RewardError
from realign.rewards.arithmetic import exact_answer
from realign.rewards.pool.functions import RewardFunction, load_function
from realign.rewards.pool.pool import RewardPool
from realign.rewards.pool.worker import FailureKind

__all__ = [
    "FailureKind",
    "RewardError",
    "RewardFunction",
    "RewardPool",
    "exact_answer",
    "load_function",
]

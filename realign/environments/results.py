"""Check the return values of an environment's `reset` and `step`, and convert them to plain Python values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from realign.environments.turns import shortened

LARGEST = torch.finfo(torch.float32).max
"""Largest absolute reward, since rewards are stored in fp32."""


@dataclass(frozen=True)
class Step:
    """Checked result of `reset` or `step`: the observation tokens, and the reward and end flags of the turn."""

    tokens: Sequence[int] = ()
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    role_rewards: Mapping[str, float] = field(default_factory=dict)
    """Reward of each role, at the end of an agent's episode with roles."""

    @property
    def over(self) -> bool:
        """Whether the episode is over."""
        return self.terminated or self.truncated


def begun(found: Any, tokens: Callable[[Any], Sequence[int]]) -> Step:
    """Check the return value of `reset`.

    Args:
        found: the return value, expected to be (observation, info).
        tokens: encodes the observation.

    Raises:
        ValueError: the return value is invalid.
    """
    if not isinstance(found, tuple | list) or len(found) != 2 or not isinstance(found[1], Mapping):
        raise ValueError(f"reset returned {shortened(found)}, expected 2 values: observation, info (a dict)")
    return Step(tokens(found[0]))


def five_values(found: Any, tokens: Callable[[Any], Sequence[int]]) -> Step:
    """Check the return value of `step`.

    Args:
        found: the return value, expected to be (observation, reward, terminated, truncated, info).
        tokens: encodes the observation; called only if another turn follows.

    Raises:
        ValueError: the return value is invalid.
    """
    if not isinstance(found, tuple | list) or len(found) != 5:
        size = f"{len(found)} values" if isinstance(found, tuple | list) else shortened(found)
        raise ValueError(f"step returned {size}, expected 5: observation, reward, terminated, truncated, info")
    observation, reward, terminated, truncated, _ = found
    ends = []
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        value = _plain(value)
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {shortened(value)}, expected True or False")
        ends.append(value)
    number, over = finite_reward(reward), any(ends)
    return Step(() if over else tokens(observation), number, ends[0], ends[1] and not ends[0])


def finite_reward(reward: Any) -> float:
    """Return a reward as a number.

    Raises:
        ValueError: it is no number, or not finite in float32.
    """
    number = _plain(reward)
    if not isinstance(number, int | float) or not abs(number) <= LARGEST:
        raise ValueError(f"the reward is {shortened(reward)}, expected a number that is finite in float32")
    return float(number)


def _plain(value: Any) -> Any:
    """Convert scalars of numpy and torch to Python scalars."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value

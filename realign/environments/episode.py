"""`Episode`: one conversation while it lasts, as the tokens that were given and sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Episode:
    """The conversation of one environment; the sequence grows turn by turn and is never rewritten."""

    name: str
    """Of the episode, distinct in the batch; the random numbers of its turns follow from it."""
    ids: Tensor
    """[T] int64: prompt, observations, sampled tokens."""
    sampled: Tensor = field(init=False)
    """[T] bool: the policy sampled this token."""
    logprobs: Tensor = field(init=False)
    """[T] fp32, 0 on given tokens."""
    versions: Tensor = field(init=False)
    """[T] int32, -1 on given tokens."""
    turn_ends: list[int] = field(default_factory=list)
    """Place of the last sampled token of each turn."""
    rewards: list[float] = field(default_factory=list)
    """Of each turn that the environment has judged."""
    truncated: bool = False
    over: bool = False
    failure: str = ""
    """Why it has no reward; empty where it has one."""

    def __post_init__(self) -> None:
        given = len(self.ids)
        self.prompt_tokens = given
        self.sampled = torch.zeros(given, dtype=torch.bool)
        self.logprobs = torch.zeros(given)
        self.versions = torch.full((given,), -1, dtype=torch.int32)

    @property
    def response_tokens(self) -> int:
        """Tokens after the prompt of the dataset."""
        return len(self.ids) - self.prompt_tokens

    def observe(self, tokens: Sequence[int]) -> None:
        """Append given tokens."""
        n = len(tokens)
        self._append(
            torch.tensor(list(tokens), dtype=torch.int64),
            torch.zeros(n, dtype=torch.bool),
            torch.zeros(n),
            torch.full((n,), -1, dtype=torch.int32),
        )

    def say(self, ids: Tensor, logprobs: Tensor, versions: Tensor) -> None:
        """Append the sampled tokens of a turn."""
        self._append(ids, torch.ones(len(ids), dtype=torch.bool), logprobs, versions)
        self.turn_ends.append(len(self.ids) - 1)

    def end(self, *, truncated: bool = False, failure: str = "") -> None:
        """No turn follows."""
        self.over, self.truncated, self.failure = True, truncated, failure

    def _append(self, ids: Tensor, sampled: Tensor, logprobs: Tensor, versions: Tensor) -> None:
        self.ids = torch.cat([self.ids, ids])
        self.sampled = torch.cat([self.sampled, sampled])
        self.logprobs = torch.cat([self.logprobs, logprobs])
        self.versions = torch.cat([self.versions, versions.int()])

    @property
    def reward(self) -> float:
        """The sum over the turns; NaN where the environment failed."""
        return float("nan") if self.failure else sum(self.rewards, 0.0)

    def dense_rewards(self) -> Tensor:
        """[T] fp32: the reward of each turn at its last sampled token, 0 elsewhere."""
        dense_T = torch.zeros(len(self.ids))
        judged = min(len(self.rewards), len(self.turn_ends))
        dense_T[self.turn_ends[:judged]] = torch.tensor(self.rewards[:judged])
        return dense_T

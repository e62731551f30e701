"""`Episode`: the state of one conversation, as prompt, observation and sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from realign.api.environment import EpisodeFailure
from realign.api.router_experts import UNKNOWN
from realign.api.sampling_mask import SamplingMask


@dataclass
class Episode:
    """The conversation with one environment. Turns are appended to its sequence; earlier tokens never change."""

    name: str
    """Name of the episode, unique in the batch; seeds the sampling of its turns."""
    ids: Tensor
    """[T] int64: prompt, observation and sampled tokens."""
    sampled: Tensor = field(init=False)
    """[T] bool: True for tokens that the policy sampled."""
    logprobs: Tensor = field(init=False)
    """[T] fp32; 0 for prompt and observation tokens."""
    versions: Tensor = field(init=False)
    """[T] int32; -1 for prompt and observation tokens."""
    experts: Tensor | None = None
    """[recorded tokens, L * K] int16: the experts that the policy's routers chose for the first tokens; None before the
    first turn, or if nothing is recorded."""
    mask: SamplingMask = field(init=False)
    """The tokens that each token was drawn from, if recorded."""
    turn_ends: list[int] = field(default_factory=list)
    """Index of the last sampled token of each turn."""
    rewards: list[float] = field(default_factory=list)
    """Reward of each turn that the environment has scored."""
    truncated: bool = False
    over: bool = False
    failure: str = ""
    """Reason why the episode has no reward; empty if it has one."""
    kind: EpisodeFailure | None = None
    """Kind of the failure that ended the episode, also of one that has a reward (`timeout_reward`)."""

    def __post_init__(self) -> None:
        given = len(self.ids)
        self.prompt_tokens = given
        self.sampled = torch.zeros(given, dtype=torch.bool)
        self.logprobs = torch.zeros(given)
        self.versions = torch.full((given,), -1, dtype=torch.int32)
        self.mask = SamplingMask.none(given)

    @property
    def response_tokens(self) -> int:
        """Number of tokens after the prompt of the dataset."""
        return len(self.ids) - self.prompt_tokens

    def observe(self, tokens: Sequence[int]) -> None:
        """Append observation tokens."""
        n = len(tokens)
        self._append(
            torch.tensor(list(tokens), dtype=torch.int64),
            torch.zeros(n, dtype=torch.bool),
            torch.zeros(n),
            torch.full((n,), -1, dtype=torch.int32),
            SamplingMask.none(n),
        )

    def say(self, ids: Tensor, logprobs: Tensor, versions: Tensor, mask: SamplingMask | None = None) -> None:
        """Append the sampled tokens of a turn."""
        mask = SamplingMask.none(len(ids)) if mask is None else mask
        self._append(ids, torch.ones(len(ids), dtype=torch.bool), logprobs, versions, mask)
        self.turn_ends.append(len(self.ids) - 1)

    def record(self, experts: Tensor) -> None:
        """Add the experts that a turn recorded for all tokens up to its last one; earlier known choices are kept.

        A token is passed through the model in each later turn, but its log-prob is that of the first pass.
        """
        if self.experts is None:
            self.experts = experts
            return
        known = torch.full_like(experts, UNKNOWN)
        known[: len(self.experts)] = self.experts
        self.experts = torch.where(known == UNKNOWN, experts, known)

    def all_experts(self) -> Tensor | None:
        """Return the experts of all tokens, `UNKNOWN` after the last turn; None if nothing was recorded."""
        if self.experts is None:
            return None
        return F.pad(self.experts, (0, 0, 0, len(self.ids) - len(self.experts)), value=UNKNOWN)

    def end(self, *, truncated: bool = False, failure: str = "", kind: EpisodeFailure | None = None) -> None:
        """Mark the episode as over."""
        self.over, self.truncated, self.failure, self.kind = True, truncated, failure, kind

    def _append(self, ids: Tensor, sampled: Tensor, logprobs: Tensor, versions: Tensor, mask: SamplingMask) -> None:
        self.ids = torch.cat([self.ids, ids])
        self.sampled = torch.cat([self.sampled, sampled])
        self.logprobs = torch.cat([self.logprobs, logprobs])
        self.versions = torch.cat([self.versions, versions.int()])
        self.mask = self.mask.then(mask)

    @property
    def reward(self) -> float:
        """Sum of the rewards of all turns; NaN if the environment failed."""
        return float("nan") if self.failure else sum(self.rewards, 0.0)

    def turn_index(self) -> Tensor:
        """Return [T] int32: the turn of each sampled token, from 0, and -1 for prompt and observation tokens."""
        turn_T = torch.searchsorted(torch.tensor(self.turn_ends), torch.arange(len(self.ids)))
        return torch.where(self.sampled, turn_T, -1).int()

    def turn_rewards(self) -> Tensor:
        """Return [T] fp32: the reward of each turn at its last sampled token, 0 elsewhere."""
        reward_T = torch.zeros(len(self.ids))
        # A turn in which the environment failed has no reward.
        judged = min(len(self.rewards), len(self.turn_ends))
        reward_T[self.turn_ends[:judged]] = torch.tensor(self.rewards[:judged])
        return reward_T

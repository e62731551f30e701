"""Terms of a reward: reward functions with their weights (config nodes)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from realign.rewards.pool.http import OpenRlhfReward
from realign.settings import Count, Finite, Positive, Settings


@dataclass
class RewardTerm(Settings, ABC):
    """Base class of reward terms: a reward function, and the weight of its reward in the sum."""

    weight: Finite = field(default=1.0, kw_only=True)
    """Factor of this reward in the sum of all rewards; 0 only reports it."""
    concurrency: Count = field(default=32, kw_only=True)
    """Concurrent calls of an `async def` function, over all workers; ignored for other functions."""

    @abstractmethod
    def load(self) -> str | Callable[..., Any]:
        """Return the function for the reward pool, by its name or as an object that can be pickled.

        Raises:
            ConfigError: the settings do not allow to create it.
        """

    def deadline_s(self, default: float) -> float:
        """Return the time limit of one call in seconds; `default` is that of the interface."""
        return default

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of environment variables that the function reads although they look like secrets."""
        return ()

    @property
    def sees_special_tokens(self) -> bool:
        """Whether the function receives prompts and responses with special tokens."""
        return False


@dataclass
class HttpProtocol(Settings):
    """Format of the requests to a reward server; used only if the function is a URL."""


@dataclass
class Realign(HttpProtocol):
    """One response per request: `{"prompt", "response", "row"}` -> `{"reward"}`."""


@dataclass
class Openrlhf(HttpProtocol):
    """One group per request, as in OpenRLHF: `{"query": [...], "prompts": [...], "labels": [...]}` -> `{"rewards"}`."""

    label_column: str | None = None
    """Column of the row that is sent as the label of each response; null sends null."""
    special_tokens: bool = True
    """Whether texts contain special tokens, such as those of a chat template."""


@dataclass
class FunctionTerm(RewardTerm):
    """A reward function by its name, or a reward server by its URL."""

    function: str
    """`package.module:function`, `path/to/file.py:function`, or the URL of a server."""
    timeout_s: Positive | None = None
    """Time limit of one call in seconds; null uses `timeout_s` of the interface."""
    protocol: HttpProtocol = field(default_factory=Realign)
    """Request format of a server: realign or openrlhf."""
    special_tokens: bool = False
    """Keep special tokens in the texts, except the one that ends the response. For tags such as `<think>` that are
    special tokens of the tokenizer."""

    @override
    def ineffective(self) -> dict[str, str]:
        if "://" not in self.function:
            return {"protocol": f"on function={self.function!r}, which is not a URL. Remove protocol"}
        return {"special_tokens": "with this protocol. Set it there"} if isinstance(self.protocol, Openrlhf) else {}

    @override
    def load(self) -> str | Callable[..., Any]:
        if isinstance(self.protocol, Openrlhf):
            return OpenRlhfReward(self.function, label_column=self.protocol.label_column)
        return self.function

    @override
    def deadline_s(self, default: float) -> float:
        return default if self.timeout_s is None else self.timeout_s

    @property
    @override
    def sees_special_tokens(self) -> bool:
        return self.protocol.special_tokens if isinstance(self.protocol, Openrlhf) else self.special_tokens

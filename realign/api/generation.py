"""`GenerationConfig`: the sampling parameters of a request."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

from realign.errors import SettingsError
from realign.settings import Count, NonNegativeInt, Range, Settings


@dataclass
class GenerationConfig(Settings):
    """How responses are sampled. These values are the whole truth: no `generation_config.json` of a model leaks in.

    Attributes:
        n: responses per prompt (the group size G).
        max_new_tokens: tokens per response, the stop token included.
        min_new_tokens: no stop token can be sampled before this many tokens (changes the distribution).
        temperature: divides the logits; applies to the reported log-probs too. At least 0.01.
        top_k: keep the k most likely tokens; 0 keeps all (changes the distribution).
        top_p: keep the smallest set of tokens with this mass; 1 keeps all (changes the distribution).
        greedy: take the most likely token; log-probs are those of the plain softmax at `temperature`.
        fixed_length: sample exactly `max_new_tokens`; stop tokens are ordinary tokens.
        stop_token_ids: tokens that end a response and belong to it; None means the model's own end tokens.
        stop_strings: texts that end a response as soon as its decoded text contains one.
    """

    n: Count = 1
    max_new_tokens: Count = 256
    min_new_tokens: NonNegativeInt = 0
    temperature: Annotated[float, Range(ge=0.01, lt=math.inf)] = 1.0
    top_k: NonNegativeInt = 0
    top_p: Annotated[float, Range(gt=0, le=1)] = 1.0
    greedy: bool = False
    fixed_length: bool = False
    stop_token_ids: list[int] | None = None
    stop_strings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_new_tokens > self.max_new_tokens:
            raise SettingsError(
                f"min_new_tokens={self.min_new_tokens}: must be at most max_new_tokens={self.max_new_tokens}"
            )
        if min(self.stop_token_ids or [0]) < 0:
            raise SettingsError(f"stop_token_ids={self.stop_token_ids}: token ids must be at least 0")
        if "" in self.stop_strings:
            raise SettingsError("stop_strings: contains an empty string, which would end every response at once")

    def distorted(self) -> list[str]:
        """Settings under which the sampled distribution is not the model's softmax at `temperature`.

        A probability ratio against log-probs of the whole softmax would be wrong under any of them.
        """
        found = [("greedy", self.greedy), ("top_k", self.top_k > 0), ("top_p", self.top_p < 1)]
        found.append(("min_new_tokens", self.min_new_tokens > 0 and not self.fixed_length))
        return [f"{name}={getattr(self, name)}" for name, on in found if on]

    def check_ratios(self) -> None:
        """Reject settings under which probability ratios of a training loss would be wrong.

        Raises:
            SettingsError: names the setting.
        """
        if distorted := self.distorted():
            raise SettingsError(
                f"generation.{distorted[0]}: changes the sampled distribution, so ratios in the loss would be wrong. "
                "Use neutral settings for training (evaluation may use any)"
            )

    def describe(self) -> str:
        """What is not neutral, and the temperature, for people."""
        return f"{', '.join(self.distorted()) or 'neutral'}, temperature {self.temperature:g}"


__all__ = ["GenerationConfig"]

"""`GenerationConfig`: the sampling parameters of a request."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated

from realign.errors import SettingsError
from realign.settings import Count, NonNegative, NonNegativeInt, Range, Settings


@dataclass
class GenerationConfig(Settings):
    """Sampling parameters. The `generation_config.json` of a model is ignored.

    Attributes:
        n: responses per prompt (the group size G).
        max_new_tokens: maximum tokens per response, including the stop token.
        min_new_tokens: don't sample a stop token before this many tokens (changes the distribution).
        temperature: sampling temperature, at least 0.01. The reported log-probs are at this temperature, too.
        top_k: sample from the k most likely tokens; 0 means all (changes the distribution).
        top_p: sample from the smallest set of tokens with this probability mass; 1 means all (changes the
            distribution).
        min_p: sample from tokens with at least this fraction of the most likely token's probability; 0 means all
            (changes the distribution).
        greedy: always take the most likely token. Log-probs are still those of the softmax at `temperature`.
        fixed_length: sample exactly `max_new_tokens` tokens; stop tokens are ordinary tokens.
        stop_token_ids: token ids that end a response (and are part of it); None means the model's end tokens.
        stop_strings: end a response as soon as its text contains one of these.
        router_replay: record which experts a mixture-of-experts model chooses for each token, and use the same ones in
            training and in recomputed log-probs.
        sampling_replay: record the tokens that top_k, top_p and min_p kept, and normalize over them in training and in
            recomputed log-probs. Set automatically by policies that train on probability ratios.
        advantage_scale: add this multiple of the advantage, min target Q - V, to the log-probs before `temperature`
            (beta of ILQL; changes the distribution). Requires a model with `head.value_head.q_heads`.
    """

    n: Count = 1
    max_new_tokens: Count = 256
    min_new_tokens: NonNegativeInt = 0
    temperature: Annotated[float, Range(ge=0.01, lt=math.inf)] = 1.0
    top_k: NonNegativeInt = 0
    top_p: Annotated[float, Range(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Range(ge=0, le=1)] = 0.0
    greedy: bool = False
    fixed_length: bool = False
    stop_token_ids: list[NonNegativeInt] | None = None
    stop_strings: list[str] = field(default_factory=list)
    router_replay: bool = False
    sampling_replay: bool = False
    advantage_scale: NonNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_new_tokens > self.max_new_tokens:
            raise SettingsError(
                f"min_new_tokens={self.min_new_tokens}: must be at most max_new_tokens={self.max_new_tokens}"
            )
        if "" in self.stop_strings:
            raise SettingsError("stop_strings: contains an empty string, which would end every response at once")
        if self.sampling_replay and not self._truncates:
            raise SettingsError("sampling_replay=true: has no effect without top_k, top_p or min_p, or with greedy")

    @property
    def _truncates(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary. Greedy sampling ignores these settings."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def with_replay(self) -> GenerationConfig:
        """Return these settings, with `sampling_replay` if they draw tokens from a part of the vocabulary."""
        return replace(self, sampling_replay=True) if self._truncates else self

    def distortions(self) -> list[str]:
        """Return the settings under which the sampling distribution is not the model's softmax at `temperature`.

        Each of them makes importance ratios against log-probs of the full softmax wrong.
        """
        settings = [("advantage_scale", self.advantage_scale > 0)]
        settings += [("greedy", self.greedy), ("top_k", self.top_k > 0), ("top_p", self.top_p < 1)]
        settings.append(("min_p", self.min_p > 0))
        # With a fixed length, no stop token ends a response, so none is suppressed.
        settings.append(("min_new_tokens", self.min_new_tokens > 0 and not self.fixed_length))
        return [f"{name}={getattr(self, name)}" for name, on in settings if on]

    @property
    def exact(self) -> bool:
        """Whether log-probs in training belong to the distribution that tokens are drawn from."""
        # The recorded tokens also lack the stop tokens that `min_new_tokens` suppressed.
        return not self.distortions() or (self.sampling_replay and self.advantage_scale == 0)

    def check_ratios(self) -> None:
        """Reject settings that make the importance ratios of a training loss wrong.

        Raises:
            SettingsError: a setting changes the sampling distribution. The message names it.
        """
        if not self.exact:
            raise SettingsError(
                f"generation.{self.distortions()[0]}: changes the sampled distribution, so ratios in the loss would be "
                "wrong. Use neutral settings for training (evaluation may use any)"
            )

    def describe(self) -> str:
        """Describe the settings that change the distribution, and the temperature."""
        replayed = " (replayed in training)" if self.sampling_replay else ""
        return f"{', '.join(self.distortions()) or 'neutral'}{replayed}, temperature {self.temperature:g}"

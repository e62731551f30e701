"""`GenerationConfig`: the sampling parameters of a request."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class GenerationConfig:
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

    n: int = 1
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    greedy: bool = False
    fixed_length: bool = False
    stop_token_ids: list[int] | None = None
    stop_strings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        checks = {
            "n": (self.n >= 1, "at least 1"),
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "min_new_tokens": (0 <= self.min_new_tokens <= self.max_new_tokens, "from 0 to max_new_tokens"),
            "temperature": (
                0.01 <= self.temperature < math.inf,
                "finite and at least 0.01 (for the most likely token use greedy=true)",
            ),
            "top_k": (self.top_k >= 0, "at least 0 (0 keeps all tokens)"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "stop_token_ids": (min(self.stop_token_ids or [0]) >= 0, "token ids, from 0 on"),
        }
        for name, (ok, valid) in checks.items():
            if not ok:
                raise ValueError(f"generation.{name} must be {valid}, found {getattr(self, name)}")
        if "" in self.stop_strings:
            raise ValueError("generation.stop_strings holds an empty string, which would end every response at once")

    def distorted(self) -> list[str]:
        """Settings under which the sampled distribution is not the model's softmax at `temperature`.

        A probability ratio against log-probs of the whole softmax would be wrong under any of them.
        """
        found = [("greedy", self.greedy), ("top_k", self.top_k > 0), ("top_p", self.top_p < 1)]
        found.append(("min_new_tokens", self.min_new_tokens > 0 and not self.fixed_length))
        return [f"{name}={getattr(self, name)}" for name, on in found if on]

    def describe(self) -> str:
        """What is not neutral, and the temperature, for people."""
        return f"{', '.join(self.distorted()) or 'neutral'}, temperature {self.temperature:g}"


__all__ = ["GenerationConfig"]

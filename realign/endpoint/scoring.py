"""`Scorer`: log-probs of the tokens of a response, and the most likely tokens at each position.

Shapes: T tokens, H hidden, V vocabulary, C positions of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from realign.api.engine import Forward, ModelOutput
from realign.api.microbatch import MicroBatchSpec
from realign.api.sample import SequenceSample

_CHUNK = 256
"""Positions whose logits are in memory at a time."""


@dataclass(frozen=True, eq=False)
class TokenScores:
    """Log-probs of a response under the softmax at a temperature."""

    logprobs: Sequence[float]
    """Log-prob of each of T tokens."""
    top: Sequence[Sequence[tuple[int, float]]]
    """The most likely token ids at each of T positions with their log-probs, the most likely one first."""


@dataclass(frozen=True)
class Scorer:
    """Scores tokens with one forward pass."""

    forward: Forward
    """See `PipelinableEngine.forward`. Can be called from any thread."""

    def score(self, prompt: Sequence[int], response: Sequence[int], top: int, temperature: float) -> TokenScores:
        """Return log-probs of a response.

        Args:
            prompt: token ids of the prompt, at least one.
            response: T token ids.
            top: number of most likely tokens per position, at least one.
            temperature: divides the logits.
        """
        names = [f"top{place}" for place in range(top)]

        def score(output: ModelOutput, part: SequenceSample) -> SequenceSample:
            hidden_TH, head, given_T = output.hidden_states(), output.lm_head, part["input_ids"]
            chunks: list[list[Tensor]] = []
            for start in range(0, len(given_T), _CHUNK):
                rows = slice(start, start + _CHUNK)
                logprobs_CV = torch.log_softmax(head.logits(hidden_TH[rows]) / temperature, -1)
                best = logprobs_CV.topk(top)
                own_C = logprobs_CV.gather(1, given_T[rows].to(logprobs_CV.device)[:, None])[:, 0]
                chunks.append([own_C, *best.values.unbind(1), *best.indices.unbind(1)])
            own_T, *tops = (torch.cat(parts) for parts in zip(*chunks, strict=True))
            values = dict(zip([*names, *(f"{name}_ids" for name in names)], tops, strict=True))
            return part.with_tokens(own=own_T, **values)

        ids = torch.tensor([*prompt, *response], dtype=torch.int64)
        sample = SequenceSample.from_sequences(["scored"], {"input_ids": [[ids]]})
        out = self.forward(sample, MicroBatchSpec(), score)
        columns = [zip(out[f"{name}_ids"].tolist(), out[name].tolist(), strict=True) for name in names]
        return TokenScores(out["own"].tolist()[len(prompt) :], list(zip(*columns, strict=True))[len(prompt) :])

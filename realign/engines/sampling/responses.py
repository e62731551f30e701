"""`Responses`: the tokens that a rollout has sampled.

Shapes: S sequences (responses), N tokens of the longest response.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Responses(NamedTuple):
    """Responses in prompt order, n per prompt; response s is in row s, starting at column 0."""

    tokens: Tensor
    """[S, N] int64."""
    logprobs: Tensor
    """[S, N] fp32, 0 after the end."""
    lengths: Tensor
    """[S] int64."""
    truncated: Tensor
    """[S] bool."""


def empty_responses(count: int, tokens: int, device: torch.device) -> Responses:
    """Allocate `count` empty responses of up to `tokens` tokens."""
    return Responses(
        torch.zeros(count, tokens, dtype=torch.int64, device=device),
        torch.zeros(count, tokens, device=device),
        torch.zeros(count, dtype=torch.int64, device=device),
        torch.zeros(count, dtype=torch.bool, device=device),
    )

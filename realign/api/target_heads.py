"""Language-model heads that losses over the whole vocabulary read from the model of another role."""

from __future__ import annotations

import torch

from realign.api.lengths import Lengths
from realign.api.sample import TOKENS, SequenceSample
from realign.functional import LMHead

HIDDEN = "_hidden"
"""Suffix of keys with hidden states: `teacher_hidden` contains those of role `teacher`, whose head maps them to logits.
"""


def role_of_hidden(key: str) -> str | None:
    """Return the role whose head maps the hidden states of this key to logits; None for other keys."""
    return key.removesuffix(HIDDEN) if key.endswith(HIDDEN) else None


def one_token() -> SequenceSample:
    """Return a batch of one token, for a forward pass that only reads the head."""
    return SequenceSample(("head",), {TOKENS: torch.zeros(1, dtype=torch.int64)}, {TOKENS: Lengths.of([[1]])})


def with_head(mb: SequenceSample, head: LMHead) -> SequenceSample:
    """Add the weights of a head as keys, which travel between processes as any other key does."""
    words = Lengths.of([[len(head.weight_VH)]])
    found = mb.with_data({"weight": head.weight_VH.detach().clone()}, lengths=words)
    if head.bias_V is not None:
        found = found.with_data({"bias": head.bias_V.detach().clone()}, lengths=words)
    numbers = torch.tensor([head.scale, head.softcap or 0.0], dtype=torch.float64)
    return found.with_data({"numbers": numbers.to(mb[TOKENS].device)}, lengths=Lengths.of([[2]]))


def head_in(found: SequenceSample) -> LMHead:
    """Return the head from the keys that `with_head` added."""
    scale, softcap = found["numbers"].tolist()
    return LMHead(found["weight"], found.get("bias"), scale, softcap or None)


__all__ = ["HIDDEN", "head_in", "one_token", "role_of_hidden", "with_head"]

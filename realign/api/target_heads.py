"""Language-model heads that losses over the whole vocabulary read from the model of another role."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from realign.api.lengths import Lengths
from realign.api.microbatch import MicroBatchSpec
from realign.api.sample import TOKENS, SequenceSample
from realign.functional import LMHead

if TYPE_CHECKING:
    from realign.api.engine import Forward, ModelOutput

HIDDEN = "_hidden"
"""Suffix of keys with hidden states: `teacher_hidden` contains those of role `teacher`, whose head maps them to logits.
"""


def role_of_hidden(key: str) -> str | None:
    """Return the role whose head maps the hidden states of this key to logits; None for other keys."""
    return key.removesuffix(HIDDEN) if key.endswith(HIDDEN) else None


def copied_head(forward: Forward) -> LMHead:
    """Return a copy of the language-model head of an engine, which `forward` may run in other processes."""
    token = SequenceSample(("head",), {TOKENS: torch.zeros(1, dtype=torch.int64)}, {TOKENS: Lengths.of([[1]])})
    return _unpacked(forward(token, MicroBatchSpec(), _packed))


def _packed(output: ModelOutput, mb: SequenceSample) -> SequenceSample:
    """Add the weights of the head as keys, which travel between processes as any other key does."""
    head = output.lm_head
    words = Lengths.of([[len(head.weight_VH)]])
    found = mb.with_data({"weight": head.weight_VH.detach().clone()}, lengths=words)
    if head.bias_V is not None:
        found = found.with_data({"bias": head.bias_V.detach().clone()}, lengths=words)
    numbers = torch.tensor([head.scale, head.softcap or 0.0], dtype=torch.float64)
    return found.with_data({"numbers": numbers.to(mb[TOKENS].device)}, lengths=Lengths.of([[2]]))


def _unpacked(found: SequenceSample) -> LMHead:
    scale, softcap = found["numbers"].tolist()
    return LMHead(found["weight"], found.get("bias"), scale, softcap or None)


__all__ = ["HIDDEN", "copied_head", "role_of_hidden"]

"""Key `sampling_mask`: the tokens of the vocabulary that top-k, top-p and min-p kept when a rollout drew each token.

These settings renormalize the distribution that a token is drawn from. A log-prob over the whole vocabulary belongs to
another distribution, and a ratio of the two is wrong even if the weights are equal. With the recorded sets, training
and recomputed log-probs are normalized over the same tokens as in the rollout ("Keep Sampling Mask",
arXiv:2512.02556, section 3.1).

A sequence of T tokens has T + K entries: for each of its tokens the size of the set (0: not sampled, or drawn from the
whole vocabulary), then the K ids of all sets. A sequence without a record, such as pretraining text, has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from realign.api.lengths import Lengths
from realign.api.sample import TOKENS, SequenceSample, on_device
from realign.functional import Support

SAMPLING_MASK = "sampling_mask"
"""The key, int32."""


class SamplingMask(NamedTuple):
    """The record of N tokens of one sequence."""

    counts_N: Tensor
    """[N] int32: size of each set; 0 for a token that was not drawn from a recorded set."""
    ids_K: Tensor
    """[K] int32: the ids of all sets."""

    @classmethod
    def none(cls, tokens: int) -> SamplingMask:
        """Return the record of tokens that were not sampled."""
        return cls(torch.zeros(tokens, dtype=torch.int32), torch.zeros(0, dtype=torch.int32))

    @classmethod
    def of(cls, sets: Sequence[Sequence[int] | Tensor]) -> SamplingMask:
        """Return the record of sampled tokens, from the ids of each set."""
        ids = [torch.as_tensor(x, dtype=torch.int32) for x in sets]
        return cls(torch.tensor([len(x) for x in ids], dtype=torch.int32), torch.cat([*ids, torch.zeros(0).int()]))

    def then(self, other: SamplingMask) -> SamplingMask:
        """Return the record of these tokens and of those that follow."""
        return SamplingMask(*(torch.cat(pair) for pair in zip(self, other, strict=True)))

    def last(self, tokens: int) -> SamplingMask:
        """Return the record of the last tokens."""
        counts_N = self.counts_N[len(self.counts_N) - tokens :]
        return SamplingMask(counts_N, self.ids_K[len(self.ids_K) - int(counts_N.sum()) :])


def with_masks(data: SequenceSample, masks: Sequence[SamplingMask | None]) -> SequenceSample:
    """Add the records of the last tokens of each sequence of `input_ids`, such as a response; None: not recorded.

    Raises:
        ValueError: a record has more tokens than its sequence.
    """
    tokens = data.lengths[TOKENS]
    parts = [torch.zeros(0, dtype=torch.int32)]
    for i, (length, mask) in enumerate(zip(tokens.flat.tolist(), masks, strict=True)):
        if mask is None:
            continue
        if len(mask.counts_N) > length:
            raise ValueError(f"sequence {i} has {length} tokens, but its sampling mask has {len(mask.counts_N)}")
        parts += [F.pad(mask.counts_N, (length - len(mask.counts_N), 0)), mask.ids_K]
    sizes = [0 if m is None else n + len(m.ids_K) for n, m in zip(tokens.flat.tolist(), masks, strict=True)]
    lengths = Lengths(tokens.counts, np.array(sizes, dtype=np.int64))
    packed = torch.cat([x.to("cpu", torch.int32) for x in parts])
    return data.with_data({SAMPLING_MASK: packed.to(data[TOKENS].device)}, lengths=lengths)


def masks_of(data: SequenceSample) -> list[SamplingMask | None]:
    """Return the record of each sequence of `input_ids`; None: not recorded.

    Raises:
        ValueError: the sizes of the sets of a sequence don't add up to its number of ids.
    """
    masks: list[SamplingMask | None] = []
    for tokens, packed in zip(data.lengths[TOKENS].flat.tolist(), data.sequences(SAMPLING_MASK), strict=True):
        mask = SamplingMask(packed[:tokens], packed[tokens:]) if len(packed) else None
        if mask is not None and (len(packed) < tokens or int(mask.counts_N.sum()) != len(mask.ids_K)):
            raise ValueError(
                f"key {SAMPLING_MASK!r}: a sequence of {tokens} tokens has {len(packed)} entries, but its sets have "
                f"{int(mask.counts_N.sum())} ids. Expected one size per token, then the ids"
            )
        masks.append(mask)
    return masks


def support_of(data: SequenceSample, device: torch.device) -> Support | None:
    """Return the recorded set of every token of `input_ids`, with its ids on `device`; None without the key.

    Raises:
        ValueError: see `masks_of`.
    """
    if SAMPLING_MASK not in data:
        return None
    data = data.select([TOKENS, SAMPLING_MASK]).to("cpu")
    lengths = data.lengths[TOKENS].flat.tolist()
    records = [m or SamplingMask.none(tokens) for tokens, m in zip(lengths, masks_of(data), strict=True)]
    counts, ids = zip(SamplingMask.none(0), *records, strict=True)
    return Support(torch.cat(counts).long(), on_device(torch.cat(ids).long(), device))

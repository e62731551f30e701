"""Which rows a packed pass computes: the beginning that the sequences of a prompt have in common stands there once.

What a causal model computes for a token depends on the token, its position and the tokens before it. So it is the same
in all sequences of a group as far as they begin alike, and responses that attend to one copy of their prompt compute
what they would compute behind a copy each. Losses go on seeing every token of every sequence.

Shapes: P prompts, S sequences, T packed tokens, R rows of the pass, N pieces of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor

from realign.api.lengths import IntArray, Lengths
from realign.api.microbatch import MicroBatches, MicroBatchSpec
from realign.api.sample import TOKENS, SequenceSample
from realign.engines.network.cpu_lanes import in_lanes

MIN_SAVED = 0.05
"""Least part of a group's tokens that must go for its prompt to be shared. Attention in two parts costs a little more:
measured on a CPU, 4 layers of hidden size 256, groups of 2 and 8, training was as fast at 0.03, 5% faster at 0.06."""


class SharedPrompts(StrEnum):
    """Whether the prompt of a group is computed once in a pass of training or scoring."""

    auto = "auto"
    off = "off"


@dataclass(frozen=True, eq=False)
class Layout:
    """The rows of a pass: pieces end to end, each a whole sequence, a shared beginning, or what comes after it.

    Attributes:
        pieces: [N] rows of each piece.
        after: [N] index of the piece that this one continues, -1 for none.
        token_R: [R] the packed token that stands in each row; None: all of them, in their order.
        row_T: [T] the row that stands for each packed token; None: its own.
    """

    pieces: IntArray
    after: IntArray
    token_R: Tensor | None = None
    row_T: Tensor | None = None

    @classmethod
    def plain(cls, lengths: Lengths) -> Layout:
        """A row for every token."""
        return cls(lengths.flat, np.full(len(lengths.flat), -1))

    @classmethod
    def of(cls, lengths: Lengths, prefix_P: IntArray) -> Layout:
        """The first `prefix_P` tokens of the sequences of each prompt stand in one piece, before what follows them."""
        shares_P = (prefix_P > 0) & (lengths.counts > 1)
        if not shares_P.any():
            return cls.plain(lengths)
        owner_S = lengths.prompt_of_sequence
        prefix_S = np.where(shares_P, prefix_P, 0)[owner_S]
        opens_S = np.zeros(len(owner_S), dtype=bool)  # a shared piece stands before this sequence's own
        opens_S[lengths.sequence_starts[:-1][shares_P]] = True
        own_S = np.arange(len(owner_S)) + np.cumsum(opens_S)
        before_S = np.where(prefix_S > 0, own_S[lengths.sequence_starts[:-1][owner_S]] - 1, -1)
        pieces, first, after = (np.empty(len(owner_S) + opens_S.sum(), dtype=np.int64) for _ in range(3))
        pieces[own_S], first[own_S], after[own_S] = lengths.flat - prefix_S, lengths.starts[:-1] + prefix_S, before_S
        shared = before_S[opens_S]
        pieces[shared], first[shared], after[shared] = prefix_S[opens_S], lengths.starts[:-1][opens_S], -1
        row_N = np.cumsum(pieces) - pieces
        place_T = _places(lengths.flat)
        own_T = np.repeat(row_N[own_S] - prefix_S, lengths.flat) + place_T
        shared_T = np.repeat(row_N[before_S], lengths.flat) + place_T
        row_T = np.where(place_T < np.repeat(prefix_S, lengths.flat), shared_T, own_T)
        token_R = np.repeat(first, pieces) + _places(pieces)
        return cls(pieces, after, torch.from_numpy(token_R), torch.from_numpy(row_T))

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 [N + 1] boundaries of the pieces, on the host."""
        return torch.from_numpy(np.concatenate([[0], np.cumsum(self.pieces)]).astype(np.int32))

    @property
    def position_R(self) -> Tensor:
        """[R] place of each row in its sequence, on the host."""
        offset_N = np.where(self.after < 0, 0, self.pieces[self.after])
        return torch.from_numpy(_places(self.pieces) + np.repeat(offset_N, self.pieces))

    @property
    def saved(self) -> int:
        """Tokens that have no row of their own."""
        return 0 if self.token_R is None or self.row_T is None else len(self.row_T) - len(self.token_R)


@dataclass(frozen=True, eq=False)
class Passes:
    """A batch as the passes that compute it: micro-batches, and the layout of each."""

    batches: MicroBatches[SequenceSample]
    layouts: tuple[Layout, ...]
    lanes: int = 1
    """How many of them run at a time."""

    @classmethod
    def of(cls, data: SequenceSample, spec: MicroBatchSpec, *, share: bool, threads: int = 1) -> Passes:
        """Cut a batch by a budget of rows.

        Args:
            data: the batch, on the host if `share`.
            spec: the budget, of all passes that run at a time.
            share: compute common beginnings once, in groups where that saves at least `MIN_SAVED`.
            threads: that may run a pass each.

        Raises:
            ValueError: see `plan_microbatches`.
        """
        lengths = data.lengths[TOKENS]
        if not share:
            lanes, spec = in_lanes(lengths, lengths.total, spec, threads)
            batches = data.split(spec)
            return cls(batches, tuple(Layout.plain(part.lengths[TOKENS]) for part in batches), lanes)
        prefix_P = worthwhile(common_prefixes(data[TOKENS].numpy(), lengths), lengths)
        saved = int((prefix_P * (lengths.counts - 1).clip(min=0)).sum())
        lanes, spec = in_lanes(lengths, lengths.total - saved, spec, threads)
        batches = data.split(spec, prefixes=prefix_P)
        owners = [prefix_P[np.unique(lengths.prompt_of_sequence[chosen])] for chosen in batches.plan]
        layouts = (Layout.of(part.lengths[TOKENS], n) for part, n in zip(batches, owners, strict=True))
        return cls(batches, tuple(layouts), lanes)

    def __iter__(self) -> Iterator[tuple[SequenceSample, Layout]]:
        return zip(self.batches, self.layouts, strict=True)

    @property
    def saved(self) -> int:
        """Tokens of the batch that were not computed again."""
        return sum(layout.saved for layout in self.layouts)


def common_prefixes(ids_T: IntArray, lengths: Lengths) -> IntArray:
    """[P] tokens with which all sequences of a prompt begin; 0 for a prompt that has one sequence, or none."""
    prefix_P = np.zeros(len(lengths.counts), dtype=np.int64)
    for p in np.flatnonzero(lengths.counts > 1).tolist():
        sequences = slice(*lengths.sequence_starts[p : p + 2].tolist())
        shortest = int(lengths.flat[sequences].min())
        tokens = ids_T[lengths.starts[:-1][sequences][:, None] + np.arange(shortest)]
        differs = (tokens != tokens[0]).any(0)
        prefix_P[p] = differs.argmax() if differs.any() else shortest
    return prefix_P


def worthwhile(prefix_P: IntArray, lengths: Lengths) -> IntArray:
    """[P] the same, but 0 where sharing would save less than `MIN_SAVED` of the group's tokens."""
    saved_P = prefix_P * (lengths.counts - 1)
    return np.where(saved_P >= MIN_SAVED * lengths.per_prompt, prefix_P, 0)


def _places(lengths: IntArray) -> IntArray:
    """0, 1, 2, ... in each of some runs of these lengths."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)

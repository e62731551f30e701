"""Passes over a batch: its micro-batches, the rows of each, and how many run at once.

**Shared prefixes.** A packed pass computes the common prefix of a group's sequences once. The same goes for the first
tokens that all its prompts have in common, such as a system message. In a causal model the result for a token depends
only on the token, its position and the previous tokens. All sequences that share the prefix get the same. Responses
that attend to one copy of their prompt get the same results as with a copy each. Losses still receive every token of
every sequence.

**Lanes.** On a CPU, several micro-batches run concurrently, each in a lane (thread) with a part of the cores. Threads
that compute one operator together must synchronize at its end. That takes microseconds if they spin, and up to 0.2 ms
if they sleep (`OMP_WAIT_POLICY=PASSIVE`, virtual machines). Most operators of a model that trains on a CPU are shorter.
Micro-batches need no synchronization until their gradients are added.

Shapes: P prompts, S sequences, T packed tokens, R rows of the pass, N pieces of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from realign.api.lengths import IntArray, Lengths
from realign.api.microbatch import MicroBatches, MicroBatchSpec
from realign.api.router_experts import experts_per_token
from realign.api.sample import PIXELS, TOKENS, SequenceSample, on_device
from realign.functional.rounding import multiplies_bf16

Item = TypeVar("Item")
Result = TypeVar("Result")
MIN_ROWS = 128
"""Minimum number of rows per lane. Splitting a smaller pass into two saves no time."""

_LANE_BYTES = 5 * 2**29
"""Memory of the gradients of all lanes, which leaves two to a model of 135 million weights on a machine of 8 GiB. The
operators of larger models are long, so that threads which compute one together rarely wait."""

_PASS_PRODUCTS = 5 * 2**35
"""Weights times rows of a pass on a CPU, a second or more of arithmetic. A longer pass saves little time, and each of
its rows needs memory."""

_SHORTEST_PASS = 256
"""Rows of the passes of large models, for each of which a CPU reads all weights."""

_MIN_SAVED = 0.05
"""Minimum fraction of a group's tokens that sharing must save. Attention in two pieces has a small overhead: on a CPU
(4 layers, hidden size 256, groups of 2 and 8) training was equally fast at a fraction of 0.03, and 5% faster at
0.06."""

_MASKED = 2000
"""A piece of n rows that continues another one attends with a mask, and its attention to itself takes twice as long.
That is as much work as n * n / 2000 rows, in a model with a hidden size of 300 to 700."""

SHORTEST = 0.75
"""Length of the shortest sequence of a batch, as a fraction of the longest. Padding then adds at most a third."""


class SharedPrompts(StrEnum):
    """Whether training and scoring passes compute the prompt of a group once."""

    auto = "auto"
    off = "off"


class ParallelPasses(StrEnum):
    """Whether the micro-batches of a batch are computed concurrently on a CPU."""

    auto = "auto"
    off = "off"


@dataclass(frozen=True, eq=False)
class Passes:
    """The passes over a batch: its micro-batches and the layout of each."""

    batches: MicroBatches[SequenceSample]
    layouts: tuple[Layout, ...]
    lanes: int = 1
    """Number of passes that run concurrently."""
    without_gradient: int = 0
    """Number of passes at the end whose loss has no gradient, if it is as `MicroBatchSpec.zero_key` says."""

    @classmethod
    def of(
        cls, data: SequenceSample, spec: MicroBatchSpec, *, share: bool, threads: int = 1, most: int | None = None
    ) -> Passes:
        """Split a batch into micro-batches by a budget of rows.

        Args:
            data: the batch; must be on the host if `share` is set.
            spec: the budget for all concurrent passes together.
            share: whether to compute common prefixes once, in groups where that saves at least `_MIN_SAVED`.
            threads: maximum number of concurrent passes.
            most: see `in_lanes`.

        Raises:
            ValueError: see `plan_microbatches`.
        """
        lengths = data.lengths[TOKENS]
        if spec.zero_key is not None and spec.zero_key in data:
            zero_P, spec = _has_zeros_only(data, spec.zero_key), replace(spec, zero_key=None)
            if lengths.per_prompt[zero_P].sum() >= MIN_ROWS * threads:
                choices = [np.flatnonzero(chosen_P).tolist() for chosen_P in (~zero_P, zero_P)]
                parts = [cls.of(data.take(p), spec, share=share, threads=threads, most=most) for p in choices]
                return cls._join(data, choices, parts)
        if not share:
            lanes, spec = in_lanes(lengths, lengths.total, spec, threads, most)
            batches = data.split(spec)
            return cls(batches, tuple(Layout.plain(part.lengths[TOKENS]) for part in batches), lanes)
        experts = experts_per_token(data)
        replayed = None if experts is None else experts.numpy()
        prefix_P = _worthwhile_prefixes(data[TOKENS].numpy(), lengths, replayed)
        saved = int((prefix_P * (lengths.counts - 1).clip(min=0)).sum())
        lanes, spec = in_lanes(lengths, lengths.total - saved, spec, threads, most)
        batches = data.split(spec, prefixes=prefix_P)
        # a micro-batch may have some sequences of a prompt only, and keeps prompts in the order of the batch
        owners = [prefix_P[np.unique(lengths.prompt_of_sequence[chosen])] for chosen in batches.plan]
        layouts = (_layout_of(part, n) for part, n in zip(batches, owners, strict=True))
        return cls(batches, tuple(layouts), lanes)

    @classmethod
    def _join(cls, data: SequenceSample, choices: Sequence[Sequence[int]], parts: Sequence[Passes]) -> Passes:
        """Return the passes over a batch, given its prompts of two kinds and the passes over them; zeros last."""
        prompt_S = data.lengths[TOKENS].prompt_of_sequence
        plan = [
            np.flatnonzero(np.isin(prompt_S, prompts))[chosen]
            for prompts, part in zip(choices, parts, strict=True)
            for chosen in part.batches.plan
        ]
        batches = MicroBatches(data, TOKENS, tuple(plan), tuple(sample for part in parts for sample in part.batches))
        layouts = tuple(layout for part in parts for layout in part.layouts)
        return cls(batches, layouts, max(part.lanes for part in parts), len(parts[-1].batches))

    def __iter__(self) -> Iterator[tuple[SequenceSample, Layout]]:
        return zip(self.batches, self.layouts, strict=True)

    @property
    def saved(self) -> int:
        """Number of tokens of the batch that are not computed because they share a row."""
        return sum(layout.saved for layout in self.layouts)


@dataclass(frozen=True, eq=False)
class Layout:
    """The rows of a pass. They consist of pieces: a whole sequence, a shared prefix, or the rest after a prefix.

    Attributes:
        pieces: [N] number of rows of each piece.
        after: [N] index of the earlier piece that this one continues, or -1.
        token_R: [R] index of the packed token in each row; None means that row t has token t.
        row_T: [T] row of each packed token; None means that token t has row t.
        own: the rows that this process computes, if several divide the pass; None means all.
        padding: number of rows at the end that belong to no token.
    """

    pieces: IntArray
    after: IntArray
    token_R: Tensor | None = None
    row_T: Tensor | None = None
    own: range | None = None
    padding: int = 0

    @classmethod
    def plain(cls, lengths: Lengths) -> Layout:
        """Return a layout with one row per token."""
        return cls(lengths.flat, np.full(len(lengths.flat), -1))

    @classmethod
    def of(cls, lengths: Lengths, prefix_P: IntArray, root: int = 0) -> Layout:
        """Return a layout with shared pieces.

        Args:
            lengths: the lengths of the sequences.
            prefix_P: number of first tokens that the sequences of each prompt share.
            root: number of first tokens that all sequences share.
        """
        shares_P = (prefix_P > root) & (lengths.counts > 1)
        if not root and not shares_P.any():
            return cls.plain(lengths)
        pieces = [(root, 0, -1)] if root else []  # rows, first token, piece before
        spans = list[tuple[int, int]]()  # first row and number of rows, in the order of the tokens
        rows = root
        for prompt, (begin, end) in enumerate(pairwise(lengths.sequence_starts.tolist())):
            seen, before, above = root, 0 if root else -1, [(0, root)]
            if shares_P[prompt]:
                seen = int(prefix_P[prompt])
                pieces.append((seen - root, int(lengths.starts[begin]) + root, before))
                above, before, rows = [*above, (rows, seen - root)], len(pieces) - 1, rows + seen - root
            for start, length in zip(lengths.starts[begin:end].tolist(), lengths.flat[begin:end].tolist(), strict=True):
                pieces.append((length - seen, start + seen, before))
                spans += [*above, (rows, length - seen)]
                rows += length - seen
        counts_N, first_N, after_N = np.array(pieces, dtype=np.int64).reshape(-1, 3).T
        row, count = np.array(spans, dtype=np.int64).reshape(-1, 2).T
        token_R, row_T = (np.repeat(x, n) + _positions(n) for x, n in ((first_N, counts_N), (row, count)))
        return cls(counts_N, after_N, torch.from_numpy(token_R), torch.from_numpy(row_T))

    def divide(self, parts: int, index: int) -> Layout:
        """Return the layout with `own` for one of several processes, which compute equally many rows each.

        A piece of padding makes the number of rows divisible. A layout without rows stays as it is.
        """
        rows = self.rows
        if not rows:
            return self
        padding = -rows % parts
        each = (rows + padding) // parts
        own = range(index * each, (index + 1) * each)
        if not padding:
            return replace(self, own=own)
        place_R = torch.arange(rows)
        token_R, row_T = (place_R if x is None else x for x in (self.token_R, self.row_T))
        return Layout(
            np.append(self.pieces, padding),
            np.append(self.after, -1),
            torch.cat([token_R, place_R.new_zeros(padding)]),  # any token: no result depends on it
            row_T,
            own,
            padding,
        )

    @property
    def rows(self) -> int:
        """Number of rows, R."""
        return int(self.pieces.sum())

    @property
    def predicted_T(self) -> Tensor | None:
        """[T] whether the row of the token before each token is in `own`, on the host; None means all."""
        if self.own is None:
            return None
        row_T = torch.arange(self.rows) if self.row_T is None else self.row_T
        before_T = row_T.roll(1)
        return (before_T >= self.own.start) & (before_T < self.own.stop)

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 [N + 1] boundaries of the pieces, on the host."""
        return torch.from_numpy(np.concatenate([[0], np.cumsum(self.pieces)]).astype(np.int32))

    @property
    def position_R(self) -> Tensor:
        """[R] position of each row in its sequence, on the host."""
        offsets: list[int] = []
        for before in self.after.tolist():
            offsets.append(0 if before < 0 else offsets[before] + int(self.pieces[before]))
        return torch.from_numpy(_positions(self.pieces) + np.repeat(np.array(offsets, dtype=np.int64), self.pieces))

    def rows_on(self, device: torch.device) -> Tensor | None:
        """Return `row_T` on a device, without a sync."""
        return None if self.row_T is None else on_device(self.row_T, device)

    def tokens_per_row(self, device: torch.device) -> Tensor:
        """Return the number of packed tokens in each row of `own`, fp32: more than 1 for a shared prefix."""
        row_T = self.rows_on(device)
        ones_R = torch.ones(self.rows, device=device)
        return self.of_own(ones_R if row_T is None else torch.bincount(row_T, minlength=self.rows).float())

    def of_own(self, x_R: Tensor) -> Tensor:
        """Return the entries of the rows in `own`."""
        return x_R if self.own is None else x_R[self.own.start : self.own.stop]

    @property
    def saved(self) -> int:
        """Number of tokens that are not computed because they share a row."""
        return 0 if self.row_T is None else len(self.row_T) - (self.rows - self.padding)


def _has_zeros_only(data: SequenceSample, key: str) -> npt.NDArray[np.bool_]:
    """Return [P] whether all values of a token-level key are 0 for a prompt."""
    lengths = data.lengths[key]
    prompt_T = np.repeat(lengths.prompt_of_sequence, lengths.flat)
    nonzero_T = (data[key] != 0).numpy()
    return np.bincount(prompt_T[nonzero_T], minlength=len(lengths.counts)) == 0


def common_prefixes(ids_T: IntArray, lengths: Lengths, experts_TN: npt.NDArray[np.int16] | None = None) -> IntArray:
    """Return the length of the common prefix of each prompt's sequences, [P]; 0 for fewer than two sequences.

    Args:
        ids_T: the tokens.
        lengths: the lengths of the sequences.
        experts_TN: experts that a pass replays, which are equal in a common prefix; None if it replays none.
    """
    prefix_P = np.zeros(len(lengths.counts), dtype=np.int64)
    for p in np.flatnonzero(lengths.counts > 1).tolist():
        sequences = slice(*lengths.sequence_starts[p : p + 2].tolist())
        shortest = int(lengths.flat[sequences].min())
        places = lengths.starts[:-1][sequences][:, None] + np.arange(shortest)
        tokens = ids_T[places]
        differs = (tokens != tokens[0]).any(0)
        if experts_TN is not None:
            experts = experts_TN[places]
            differs |= (experts != experts[0]).any((0, 2))
        prefix_P[p] = differs.argmax() if differs.any() else shortest
    return prefix_P


def _worthwhile_prefixes(
    ids_T: IntArray, lengths: Lengths, experts_TN: npt.NDArray[np.int16] | None = None
) -> IntArray:
    """Return `common_prefixes`, with 0 where sharing saves a fraction below `_MIN_SAVED` of the prompt's tokens."""
    prefix_P = common_prefixes(ids_T, lengths, experts_TN)
    saved_P = prefix_P * (lengths.counts - 1)
    return np.where(saved_P >= _MIN_SAVED * lengths.per_prompt, prefix_P, 0)


def share_start(
    ids_T: IntArray, lengths: Lengths, prefix_P: IntArray, experts_TN: npt.NDArray[np.int16] | None = None
) -> Layout:
    """Return `Layout.of` with the first tokens that all sequences share, where that saves time.

    Args:
        ids_T: the tokens.
        lengths: the lengths of the sequences.
        prefix_P: see `Layout.of`.
        experts_TN: see `common_prefixes`.
    """
    root = int(common_prefixes(ids_T, Lengths.of([lengths.flat.tolist()]), experts_TN)[0])
    alone_S = (prefix_P == 0)[lengths.prompt_of_sequence]
    after_N = np.concatenate([prefix_P[prefix_P > 0], lengths.flat[alone_S]]) - root
    saved, rows = root * (len(after_N) - 1), lengths.total - int((prefix_P * (lengths.counts - 1).clip(min=0)).sum())
    worth = saved >= _MIN_SAVED * rows + float((after_N**2).sum()) / _MASKED
    return Layout.of(lengths, prefix_P, root if worth else 0)


def _layout_of(part: SequenceSample, prefix_P: IntArray) -> Layout:
    """Return the layout of a micro-batch whose prompts have shared prefixes."""
    lengths, experts = part.lengths[TOKENS], experts_per_token(part)
    if PIXELS in part:  # equal tokens of two prompts may stand for different images
        return Layout.of(lengths, prefix_P)
    return share_start(part[TOKENS].numpy(), lengths, prefix_P, None if experts is None else experts.numpy())


def _positions(lengths: IntArray) -> IntArray:
    """Return 0, 1, 2, ... for each of the given lengths, concatenated."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def most_lanes(trained: int) -> int:
    """Return the number of concurrent passes whose gradients leave room, for a model that trains so many weights."""
    # each lane computes one gradient; one more waits to be added, and one is the sum
    return max(1, _LANE_BYTES // (4 * max(1, trained)) - 2)


def most_rows(weights: int, *, rounded: bool = False) -> int:
    """Return the number of rows beyond which a pass on a CPU only needs more memory, for a model of so many weights.

    With rounded weights and instructions for bf16, twice as many take as long.
    """
    products = _PASS_PRODUCTS * (2 if rounded and multiplies_bf16() else 1)
    return max(_SHORTEST_PASS, products // max(1, weights))


def in_lanes(
    lengths: Lengths, rows: int, spec: MicroBatchSpec, threads: int, most: int | None = None
) -> tuple[int, MicroBatchSpec]:
    """Choose the number of concurrent passes (lanes), and divide the budget and the rows among them.

    Args:
        lengths: sequence lengths of the batch.
        rows: number of rows of all its passes together.
        spec: the budget for all concurrent passes together.
        threads: maximum number of lanes.
        most: number of rows of a pass unless the longest sequence has more; None: only the budget limits them.

    Returns:
        The number of lanes and the spec of one lane. They are 1 and `spec` if the batch is too small to split, or if
        the budget does not fit two of the longest sequences (with `whole_groups`: groups).
    """
    limit = spec.max_tokens_per_microbatch
    parts = lengths.per_prompt if spec.whole_groups else lengths.flat
    longest = int(parts.max(initial=1))
    lanes = max(1, min(threads, len(parts), rows // MIN_ROWS, threads if limit is None else limit // max(1, longest)))
    if most is not None:
        enough = lanes * max(longest, most)
        limit = enough if limit is None else min(limit, enough)
        spec = replace(spec, max_tokens_per_microbatch=limit)
    if lanes == 1:
        return 1, spec
    lane_limit = None if limit is None else limit // lanes
    # each lane has a part of the budget, so what would be one pass of the whole budget is one pass in every lane
    rounds = 1 if limit is None else -(-rows // limit)
    return lanes, replace(
        spec, max_tokens_per_microbatch=lane_limit, n_microbatches=max(spec.n_microbatches, lanes * rounds)
    )


def side_by_side(work: Callable[[Item], Result], items: Iterable[Item], lanes: int) -> Iterator[Result]:
    """Yield `work(item)` for each item, in order; `lanes` threads run concurrently.

    The lanes divide the threads of torch among them. At most `lanes` + 1 results are pending. Inside `work`,
    thread-local state of torch (grad mode, autocast) has its default. An exception cancels the remaining items.
    """
    if lanes == 1:
        yield from map(work, items)
        return
    threads = torch.get_num_threads()

    def alone(item: Item) -> Result:
        # OpenMP keeps this number per thread, and any thread of the pool may get the next item
        torch.set_num_threads(max(1, threads // lanes))
        return work(item)

    waiting: deque[Future[Result]] = deque()
    try:
        with ThreadPoolExecutor(lanes, thread_name_prefix="pass") as pool:
            try:
                for item in items:
                    waiting.append(pool.submit(alone, item))
                    if len(waiting) > lanes:  # one more than lanes, so that none idles while the caller uses a result
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()
    finally:
        torch.set_num_threads(threads)  # the lanes lowered MKL's process-wide thread count


def rewrites_rope(module: nn.Module) -> bool:
    """Return whether each pass modifies the rotary frequencies for its longest sequence.

    Such passes cannot run concurrently.
    """
    rope_types = (getattr(part, "rope_type", None) for part in module.modules())
    kinds = {kind for x in rope_types for kind in (x.values() if isinstance(x, Mapping) else [x])}
    return any(kind is not None and ("dynamic" in kind or kind == "longrope") for kind in kinds)


def similar_lengths(lengths: Sequence[int], shortest: float = SHORTEST) -> Iterator[list[int]]:
    """Yield the indices of the sequences of each batch, by decreasing length; empty sequences are in no batch.

    Args:
        lengths: the lengths.
        shortest: see `SHORTEST`; 1 yields batches of equal lengths.
    """
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and lengths[i] < lengths[batch[0]] * shortest:
            yield batch
            batch = []
        if lengths[i]:
            batch.append(i)
    if batch:
        yield batch

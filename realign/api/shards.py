"""Sharding of a batch over data-parallel ranks, by prompt and balanced by tokens, and the inverse."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

import numpy as np

from realign.api.lengths import IntArray, Lengths
from realign.api.microbatch import Cut
from realign.api.packing import some
from realign.api.sample import SequenceSample


def shard(data: SequenceSample, n: int, key: str) -> Shards:
    """Assign each prompt, with all of its sequences, to one of `n` ranks, balancing tokens.

    Assigns prompts, longest first, to the rank with the fewest tokens so far (Graham 1969, doi:10.1137/0117039). Two
    ranks differ by at most one prompt's tokens. The assignment depends only on the lengths of `key`.

    Args:
        data: the batch.
        n: number of ranks. With more ranks than prompts, some receive none.
        key: key whose tokens are counted: "input_ids", or "prompt_ids" before sampling.

    Raises:
        ValueError: `n` is below 1, or there is no such packed key.
    """
    if n < 1:
        raise ValueError(f"n={n}: a batch needs at least 1 rank")
    if key not in data.lengths:
        raise ValueError(f"no packed key {key!r} to shard by (keys: {', '.join(sorted(data.lengths)) or 'none'})")
    plan = _plan(data.lengths[key].per_prompt, n)
    return Shards(data, key, plan, tuple(data.take(prompts) for prompts in plan))


def _plan(tokens: IntArray, n: int) -> tuple[IntArray, ...]:
    """Return, for each rank, the ascending positions of its prompts."""
    heap = [(0, 0, rank) for rank in range(n)]  # tokens, prompts (to balance prompts without tokens too), rank
    ranks = np.zeros(len(tokens), dtype=np.int64)
    for prompt in np.argsort(-tokens, kind="stable").tolist():
        load, prompts, ranks[prompt] = heap[0]
        heapq.heapreplace(heap, (load + int(tokens[prompt]), prompts + 1, int(ranks[prompt])))
    return tuple(np.flatnonzero(ranks == rank) for rank in range(n))


class Shards(Cut[SequenceSample]):
    """The parts of a batch, one per rank, and the inverse of the sharding.

    Attributes:
        whole: the sharded batch.
        key: key whose tokens were counted.
        plan: for each rank, the ascending positions of its prompts.
        parts: for each rank, its prompts with all keys and metadata. A part may have no prompts.
    """

    def __repr__(self) -> str:
        return f"Shards(tokens of {self.key!r}: {[part.lengths[self.key].total for part in self.parts]})"

    def restore(self, parts: Sequence[SequenceSample]) -> SequenceSample:
        """Combine results, one sample per rank with the prompts of its part, in the order of the whole.

        Args:
            parts: results in rank order, with the same keys and any lengths. The result of a part without sequences
                may have no keys.

        Raises:
            ValueError: a result has other prompts than its part, or lacks a key of the other results.
        """
        if len(parts) != len(self.parts):
            raise ValueError(f"restore got {len(parts)} results for {len(self.parts)} ranks")
        for rank, (found, asked) in enumerate(zip(parts, self.parts, strict=True)):
            if found.ids != asked.ids:
                raise ValueError(f"restore got ids {some(found.ids)} for rank {rank}, whose part has {some(asked.ids)}")
        known = next((part for part in parts if part.keys), parts[0])
        pairs = zip(parts, self.parts, strict=True)
        full = [_nothing_like(known, a.ids) if not (a.keys or len(b.lengths[self.key].flat)) else a for a, b in pairs]
        return SequenceSample.gather(full).take(np.argsort(np.concatenate(self.plan)))


def _nothing_like(known: SequenceSample, ids: tuple[Hashable, ...]) -> SequenceSample:
    """Return prompts without sequences, with the keys of another sample."""
    lengths = Lengths(np.zeros(len(ids), dtype=np.int64), np.zeros(0, dtype=np.int64))
    metadata = {} if ids else dict.fromkeys(known.metadata, ())
    return SequenceSample(ids, {k: x[:0] for k, x in known.data.items()}, dict.fromkeys(known.data, lengths), metadata)

"""Splitting of a batch into micro-batches by token budget, planned from lengths alone, and the inverse."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from realign.api.lengths import IntArray, Lengths, as_integers, concatenate, pick, some
from realign.errors import SettingsError
from realign.run_settings import MicroBatchLimits
from realign.settings import Count


class _Cuttable(Protocol):
    """The attributes that splitting needs. `SequenceSample` has them, and imports this module."""

    @property
    def ids(self) -> tuple[Hashable, ...]:
        """One id per prompt."""
        ...

    @property
    def data(self) -> Mapping[str, Any]:
        """The packed tensors by key."""
        ...

    @property
    def lengths(self) -> Mapping[str, Lengths]:
        """The lengths of the sequences of each key."""
        ...


Sample = TypeVar("Sample", bound=_Cuttable)


@dataclass
class MicroBatchSpec(MicroBatchLimits):
    """Limits of a micro-batch, and what an algorithm and the runtime ask of the split.

    They trade memory for speed, and do not change loss, gradient or metrics.

    Attributes:
        max_tokens_per_microbatch: as in `MicroBatchLimits`; None means no limit.
        n_microbatches: as in `MicroBatchLimits`.
        whole_groups: never split a group (the sequences of one prompt). Algorithms set it if their loss compares the
            sequences of a group.
        trace_ids: prompts whose per-token values the engine returns with the metrics (`realign.api.stats`); none if
            empty.
        zero_key: key of token values that are factors of the loss, such as advantages. Prompts with only zeros have no
            gradient, and an engine may compute them apart from others, without a backward pass.

    Raises:
        SettingsError: an attribute is out of range. The message names it.
    """

    by_word: ClassVar[bool] = False  # a config sets the limits only

    max_tokens_per_microbatch: Count | None = None
    whole_groups: bool = field(default=False, repr=False)
    trace_ids: tuple[Hashable, ...] = field(default=(), repr=False)
    zero_key: str | None = field(default=None, repr=False)


def plan_microbatches(
    lengths: Lengths,
    spec: MicroBatchSpec,
    ids: Sequence[Hashable] | None = None,
    prefixes: IntArray | None = None,
) -> list[IntArray]:
    """Assign every sequence to a micro-batch, within the token budget and balanced.

    A group (all sequences of one prompt) is split between sequences only if it exceeds the budget. With
    `whole_groups`, such a group raises an error.

    Uses longest-processing-time scheduling. For a given number of micro-batches, the largest load is within 4/3 of
    the optimum (Graham 1969, doi:10.1137/0117039). The number starts at the lower bound and grows if groups do not
    fit. It stays below 2 * tokens / budget + 1 unless most groups exceed half of the budget. The loads are then
    rebalanced as far as the budget allows.

    Args:
        lengths: tokens of each sequence of each prompt.
        spec: the budget.
        ids: names of the prompts for error messages; their positions by default.
        prefixes: for each prompt, the number of shared prefix tokens of its sequences, which count once per
            micro-batch; 0 by default. If such a group must be split, it is split into runs of adjacent sequences.

    Returns:
        For each micro-batch, the ascending indices of its sequences. Each index is in exactly one micro-batch, and no
        micro-batch is empty. A batch without sequences has no micro-batches.

    Raises:
        SettingsError: one sequence exceeds the budget, or one group does with `whole_groups`.
        ValueError: `prefixes` does not have one entry per prompt, or an entry exceeds the prompt's shortest sequence.
    """
    limit = spec.max_tokens_per_microbatch
    if not len(lengths.flat):
        return []
    _check_longest(lengths, limit, ids)
    once = np.zeros(len(lengths.counts), dtype=np.int64) if prefixes is None else _check_prefixes(prefixes, lengths)
    if spec.whole_groups:
        _check_groups(lengths, once, limit, ids)
    unit_of_sequence, loads = _units(lengths, once, limit)
    # Stable: the order of ties of numpy's default sort depends on the CPU, and the plan orders the sums of the loss.
    order = np.argsort(-loads, kind="stable")
    sizes = loads[order].tolist()
    n_bins = min(spec.n_microbatches, len(sizes))
    if limit is not None:
        n_bins = max(n_bins, -(-int(loads.sum()) // limit))
    bins, largest = _fill(sizes, n_bins, limit)
    if (needed := max(bins) + 1) > n_bins:
        # Bins added late are emptier: redistribute over the final number of bins, and keep the result if it fits.
        even, largest = _fill(sizes, needed, None)
        bins = even if limit is None or largest <= limit else bins
    bin_of_unit = np.empty(len(bins), dtype=np.int64)
    bin_of_unit[order] = bins
    bin_of_sequence = bin_of_unit[unit_of_sequence]
    by_bin = np.argsort(bin_of_sequence, kind="stable")
    plan = np.split(by_bin, np.cumsum(np.bincount(bin_of_sequence))[:-1])
    return sorted(plan, key=lambda sequences: int(sequences[0]))


def _check_prefixes(prefixes: IntArray, lengths: Lengths) -> IntArray:
    once = as_integers("prefixes", prefixes)
    if len(once) != len(lengths.counts):
        raise ValueError(f"prefixes has {len(once)} entries, expected one for each of {len(lengths.counts)} prompts")
    if (once < 0).any() or (once[lengths.prompt_of_sequence] > lengths.flat).any():
        raise ValueError(f"prefixes must be from 0 to the shortest sequence of each prompt, found {once.tolist()[:10]}")
    return once


def _check_longest(lengths: Lengths, limit: int | None, ids: Sequence[Hashable] | None) -> None:
    s = int(lengths.flat.argmax())
    if limit is not None and lengths.flat[s] > limit:
        prompt = int(lengths.prompt_of_sequence[s])
        number = s - int(lengths.sequence_starts[prompt])
        raise SettingsError(
            f"microbatch.max_tokens_per_microbatch={limit}: sequence {number} of {_owner(prompt, ids)} has "
            f"{int(lengths.flat[s])} tokens. Raise the budget or shorten the data"
        )


def _check_groups(lengths: Lengths, once: IntArray, limit: int | None, ids: Sequence[Hashable] | None) -> None:
    loads = _loads(lengths, once)
    prompt = int(loads.argmax())
    if limit is not None and loads[prompt] > limit:
        raise SettingsError(
            f"microbatch.max_tokens_per_microbatch={limit}: the {int(lengths.counts[prompt])} sequences of "
            f"{_owner(prompt, ids)} have {int(loads[prompt])} tokens, and the loss needs them in one micro-batch. "
            "Raise the budget or shorten the data"
        )


def _owner(prompt: int, ids: Sequence[Hashable] | None) -> str:
    return f"prompt {prompt} of the batch" if ids is None else f"id {ids[prompt]!r}"


def _loads(lengths: Lengths, once: IntArray) -> IntArray:
    """Count the tokens of each group [n_prompts], with its `once` shared prefix tokens counted once."""
    return lengths.per_prompt - once * (lengths.counts - 1).clip(min=0)


def _units(lengths: Lengths, once: IntArray, limit: int | None) -> tuple[IntArray, IntArray]:
    """Return the indivisible units: groups, or the sequences (or runs of them) of groups that exceed the budget.

    Returns:
        The unit of each sequence [S], and the tokens of each unit.
    """
    opens_unit = np.zeros(len(lengths.flat), dtype=bool)
    opens_unit[lengths.sequence_starts[:-1][lengths.counts > 0]] = True
    if limit is not None:
        too_large = _loads(lengths, once) > limit
        opens_unit |= (too_large & (once == 0))[lengths.prompt_of_sequence]
        for prompt in np.flatnonzero(too_large & (once > 0)).tolist():
            first, last = lengths.sequence_starts[prompt : prompt + 2].tolist()
            # Each run contains the shared prefix once, so it is off both the sequences and the limit.
            opens_unit[first:last] = _opens_run(lengths.flat[first:last] - once[prompt], limit - once[prompt])
    unit_of_sequence = np.cumsum(opens_unit) - 1
    once_S = once[lengths.prompt_of_sequence]
    loads = np.bincount(unit_of_sequence, weights=lengths.flat - np.where(opens_unit, 0, once_S))
    return unit_of_sequence, loads.astype(np.int64)


def _opens_run(sizes: IntArray, limit: int) -> list[bool]:
    """Return whether each sequence starts a new run, when runs are filled in order up to the limit."""
    # A load above the limit, so that the first sequence starts a run.
    opens, load = [], limit + 1
    for size in sizes.tolist():
        opens.append(load + size > limit)
        load = size if opens[-1] else load + size
    return opens


def _fill(sizes: Sequence[int], n_bins: int, limit: int | None) -> tuple[list[int], int]:
    """Assign each unit, largest first, to the emptiest bin. Add a bin if the unit does not fit.

    Returns:
        The bin of each unit, and the largest load. No bin is empty if there are at least as many units as bins.
    """
    heap = [(0, 0, b) for b in range(n_bins)]  # load, units (to balance units without tokens too), bin
    bins: list[int] = []
    largest = 0
    for size in sizes:
        load, n_units, b = heap[0]
        if limit is not None and load + size > limit:
            load, n_units, b = 0, 0, len(heap)
            heapq.heappush(heap, (size, 1, b))
        else:
            heapq.heapreplace(heap, (load + size, n_units + 1, b))
        bins.append(b)
        largest = max(largest, load + size)
    return bins, largest


@dataclass(frozen=True, eq=False, repr=False)
class MicroBatches(Sequence[Sample], Generic[Sample]):
    """The micro-batches of a sample, and the inverse of the split.

    Attributes:
        batch: the split sample.
        key: key whose tokens were counted.
        plan: for each micro-batch, the ascending indices of its sequences of `key`.
        parts: the micro-batches.
    """

    batch: Sample
    key: str
    plan: tuple[IntArray, ...]
    parts: tuple[Sample, ...]

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: Any) -> Any:
        return self.parts[index]

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.parts)

    def __repr__(self) -> str:
        loads = [part.lengths[self.key].total for part in self.parts]
        sizes = f" of {min(loads)} to {max(loads)} rows of {self.key!r}" if loads else ""
        return f"MicroBatches({len(loads)} micro-batches{sizes})"

    def restore(self, parts: Sequence[Sample]) -> Sample:
        """Combine results, one sample per micro-batch with its sequences, in the order of the batch.

        Args:
            parts: for each micro-batch, in order, a sample with its ids. All parts have the same keys. Each key has
                one sequence per sequence of the micro-batch, of any length (per token, one per sequence, ...).

        Returns:
            A sample with the ids of the batch and the packed keys of the parts, without metadata.

        Raises:
            ValueError: a part has other ids, lacks a key, or has another number of sequences than its micro-batch.
        """
        if len(parts) != len(self.parts):
            raise ValueError(f"restore got {len(parts)} parts for {len(self.parts)} micro-batches")
        names = list(dict.fromkeys(name for part in parts for name in part.data))
        for part, asked in zip(parts, self.parts, strict=True):
            self._check_part(part, asked, names)
        # The empty array is for batches without micro-batches.
        order = np.concatenate([np.zeros(0, dtype=np.int64), *self.plan])
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        data, lengths = {}, {}
        rows = {}
        for name in names:
            cuts = [part.lengths[name] for part in parts]
            if (shared := tuple(map(id, cuts))) not in rows:  # keys that share lengths share an index
                joined = Lengths.join(cuts)
                rows[shared] = joined.rows(back), Lengths(self.batch.lengths[self.key].counts, joined.flat[back])
            index, lengths[name] = rows[shared]
            data[name] = pick(concatenate(name, [part.data[name] for part in parts], [p.ids for p in parts]), index)
        batch: Any = self.batch
        restored: Sample = replace(batch, data=data, lengths=lengths, metadata={})
        return restored

    def _check_part(self, part: Sample, asked: Sample, names: Sequence[str]) -> None:
        if part.ids != asked.ids:
            raise ValueError(f"restore got ids {some(part.ids)} for the micro-batch with ids {some(asked.ids)}")
        for name in names:
            if name not in part.data:
                raise ValueError(f"key {name!r} is missing for ids {some(part.ids)}, but present for others")
            if not part.lengths[name].same_sequences(asked.lengths[self.key]):
                raise ValueError(
                    f"key {name!r} has {len(part.lengths[name].flat)} sequences, expected "
                    f"{len(asked.lengths[self.key].flat)} for the micro-batch with ids {some(asked.ids)}"
                )

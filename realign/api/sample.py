"""`SequenceSample`: a batch of prompts, each with its sequences, as packed 1-D tensors.

T packed tokens, S sequences. All per-token tensors are aligned: index t contains the data of token t. Lengths are
stored explicitly and never inferred from token ids. Ids identify prompts. Shuffling and sharding operate on prompts,
so each prompt keeps all of its sequences.
"""

from __future__ import annotations

import difflib
import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realign.api.lengths import IntArray, Lengths, Nested, Rows, as_integers, concatenate, describe, pack, pick, some
from realign.api.microbatch import MicroBatches, MicroBatchSpec, plan_microbatches
from realign.functional import first_of_each

TOKENS = "input_ids"
_WITH_IMAGES = frozenset({TOKENS, "prompt_ids"})
"""Keys with image tokens, whose meaning depends on the images of the prompt."""

# A prompt has one sequence of patches and one of grids, with those of all its images in order. They belong to all
# sequences of the prompt, so responses share them. A sequence contains the tokens of the first images of its prompt.
# P patches of all images, d values of a patch, I images.
PIXELS = "pixel_values"
"""[P, d] fp32: patches of the images, from the image processor of the model."""
GRIDS = "image_grid_thw"
"""[I, 3] int64: number of patches of each image along time, height and width."""
IMAGE_KEYS = (PIXELS, GRIDS)

# Keys [S] that say which sequence this is, as the id says which prompt. They are written where the tokens are made, and
# no filter changes them, so a record finds the tokens that a value belongs to.
RESPONSE_INDEX = "response_index"
"""Which of its prompt's sequences this is, from 0."""
EPISODE = "episode"
"""Which episode of its prompt the sequence belongs to, from 0. An agent makes several sequences in an episode; without
this key, every sequence is an episode of its own."""
INDEX_KEYS = (RESPONSE_INDEX, EPISODE)


class MissingKeyError(ValueError):
    """Raised when a batch lacks a packed key; `key` is its name."""

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


@dataclass(frozen=True, eq=False, repr=False)
class SequenceSample:
    """An immutable batch of prompts with packed tensors of any lengths, validated on construction.

    Attributes:
        ids: one unique id per prompt.
        data: packed tensor of each key. The first dimension is packed; other dimensions are arbitrary.
        lengths: sequence lengths of each key.
        metadata: for each key, one Python object per prompt, such as a row of the dataset.

    Raises:
        ValueError: keys, ids and lengths are inconsistent. The message names the key, the id and both lengths.
    """

    ids: tuple[Hashable, ...]
    data: Mapping[str, Tensor] = field(default_factory=dict)
    lengths: Mapping[str, Lengths] = field(default_factory=dict)
    metadata: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", _as_ids(self.ids))
        object.__setattr__(self, "data", MappingProxyType(dict(self.data)))
        metadata = {key: _as_metadata(key, values) for key, values in self.metadata.items()}
        object.__setattr__(self, "metadata", MappingProxyType(metadata))
        if odd := [key for key in (*self.data, *self.lengths, *self.metadata) if not isinstance(key, str)]:
            raise ValueError(f"keys must be text, found {odd[0]!r}")
        if self.data.keys() != self.lengths.keys():
            raise ValueError(f"keys with data {sorted(self.data)} and keys with lengths {sorted(self.lengths)} differ")
        if both := self.data.keys() & self.metadata.keys():
            raise ValueError(f"key {min(both)!r} is in both data and metadata. Rename one of them")
        distinct: list[Lengths] = []  # keys with equal lengths share one object, so that selecting rows indexes once
        lengths = {}
        for key, cut in self.lengths.items():
            _check_packed(key, self.data[key], cut, self.ids)
            lengths[key] = next((known for known in distinct if known == cut), cut)
            if lengths[key] is cut:
                distinct.append(cut)
        object.__setattr__(self, "lengths", MappingProxyType(lengths))
        for key, objects in self.metadata.items():
            if len(objects) != len(self.ids):
                raise ValueError(f"metadata {key!r} has {len(objects)} entries for {len(self.ids)} ids")

    def __reduce__(self) -> tuple[type[SequenceSample], tuple[Any, ...]]:
        # Pickling a view would include its whole storage.
        data = {k: x.clone() if x.untyped_storage().nbytes() > x.nbytes else x for k, x in self.data.items()}
        return SequenceSample, (self.ids, data, dict(self.lengths), dict(self.metadata))

    @classmethod
    def from_sequences(
        cls,
        ids: Sequence[Hashable],
        data: Mapping[str, Nested],
        metadata: Mapping[str, Sequence[Any]] | None = None,
    ) -> SequenceSample:
        """Pack nested sequences: for each key, one list per prompt with one tensor or list per sequence."""
        packed = {key: pack(key, ids, nested) for key, nested in data.items()}
        return cls(
            tuple(ids),
            {key: x for key, (x, _) in packed.items()},
            {key: lengths for key, (_, lengths) in packed.items()},
            {key: _as_metadata(key, objects) for key, objects in (metadata or {}).items()},
        )

    @classmethod
    def gather(cls, samples: Sequence[SequenceSample]) -> SequenceSample:
        """Concatenate batches of different prompts with the same keys.

        Raises:
            ValueError: two samples contain the same id, or a key is absent or has another dtype in some samples.
        """
        if not samples:
            raise ValueError("gather needs at least one sample")
        first = samples[0]
        keys = set().union(*(s.keys for s in samples))
        for s in samples:
            if missing := keys - s.keys:
                raise ValueError(f"key {min(missing)!r} is missing for ids {some(s.ids)}, but present for others")
            if mixed := s.data.keys() ^ first.data.keys():
                ids = some(first.ids + s.ids)
                raise ValueError(f"key {min(mixed)!r} is metadata for some of the ids {ids} and a tensor for others")
        joined: dict[tuple[int, ...], Lengths] = {}  # keys that share lengths share the joined ones
        lengths = {}
        for k in first.data:
            parts = [s.lengths[k] for s in samples]
            shared = tuple(map(id, parts))
            if shared not in joined:
                joined[shared] = Lengths.join(parts)
            lengths[k] = joined[shared]
        return cls(
            ids=tuple(i for s in samples for i in s.ids),
            data={k: concatenate(k, [s.data[k] for s in samples], [s.ids for s in samples]) for k in first.data},
            lengths=lengths,
            metadata={k: tuple(x for s in samples for x in s.metadata[k]) for k in first.metadata},
        )

    def with_data(
        self, data: Mapping[str, Tensor | Nested], *, like: str | None = None, lengths: Lengths | None = None
    ) -> SequenceSample:
        """Add or replace keys that have the lengths of the key `like`, or the given `lengths`.

        Raises:
            ValueError: a value does not have these lengths. For nested values, the message names the id.
        """
        if (like is None) == (lengths is None):
            raise ValueError("with_data: pass either `like` (a key) or `lengths`")
        cut = lengths if lengths is not None else self.lengths[self._check_key(like or "")]
        packed = {k: v if isinstance(v, Tensor) else self._pack(k, v, cut) for k, v in data.items()}
        return replace(self, data={**self.data, **packed}, lengths={**self.lengths, **dict.fromkeys(data, cut)})

    def with_tokens(self, **data: Tensor | Nested) -> SequenceSample:
        """Add keys with one element per token of `input_ids`."""
        return self.with_data(data, like=TOKENS)

    def with_sequences(self, **data: Tensor | Nested) -> SequenceSample:
        """Add keys with one element per sequence of `input_ids`."""
        return self.with_data(data, lengths=self.lengths[self._check_key(TOKENS)].ones())

    def with_metadata(self, **metadata: Sequence[Any]) -> SequenceSample:
        """Add keys with one Python object per prompt."""
        return replace(self, metadata={**self.metadata, **{k: _as_metadata(k, v) for k, v in metadata.items()}})

    def _pack(self, key: str, nested: Nested, cut: Lengths) -> Tensor:
        x, lengths = pack(key, self.ids, nested)
        if lengths != cut:
            pairs = zip(self.ids, lengths.as_tuples(), cut.as_tuples(), strict=True)
            i, got, want = next(differing for differing in pairs if differing[1] != differing[2])
            raise ValueError(f"key {key!r}, id {i!r}: lengths {list(got)}, expected {list(want)}")
        return x

    @property
    def keys(self) -> set[str]:
        """Names of all packed tensors and metadata."""
        return {*self.data, *self.metadata}

    def __contains__(self, key: object) -> bool:
        return key in self.data or key in self.metadata

    def __getitem__(self, key: str) -> Tensor:
        return self.data[self._check_key(key)]

    def get(self, key: str) -> Tensor | None:
        """Return the packed tensor of an optional key, or None."""
        return self.data.get(key)

    def _check_key(self, key: str) -> str:
        if key in self.metadata:
            raise ValueError(f"key {key!r} is metadata, not a packed tensor. Read it from `.metadata`")
        if key not in self.data:
            near = difflib.get_close_matches(key, self.data, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise MissingKeyError(f"no packed key {key!r}{hint} (keys: {', '.join(sorted(self.data)) or 'none'})", key)
        return key

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def n_sequences(self) -> int:
        """Number of sequences of `input_ids`."""
        return len(self.lengths[self._check_key(TOKENS)].flat)

    def cu_seqlens(self, key: str = TOKENS) -> Tensor:
        """Return the boundaries of the sequences of `key`: int32 [S + 1] with a leading 0, on the device of `key`."""
        starts = self.lengths[self._check_key(key)].starts
        if starts[-1] > np.iinfo(np.int32).max:
            raise ValueError(f"key {key!r} has {starts[-1]} rows, which exceeds int32 cu_seqlens. Use a smaller batch")
        return on_device(torch.from_numpy(starts.astype(np.int32)), self.data[key].device)

    def group_index(self, key: str = TOKENS) -> Tensor:
        """Return the index of the prompt of each sequence of `key`: int64 [S]."""
        owners = self.lengths[self._check_key(key)].prompt_of_sequence
        # A copy, since torch warns about numpy arrays that are read-only.
        return on_device(torch.from_numpy(owners.copy()), self.data[key].device)

    def episode_index(self) -> Tensor:
        """Return the index of the episode of each sequence of `input_ids` among all episodes of the batch: [S]."""
        if EPISODE not in self:
            return torch.arange(self.n_sequences, device=self[TOKENS].device)
        return torch.stack([self.group_index(), self[EPISODE]], 1).unique(dim=0, return_inverse=True)[1]

    def once_per_episode(self, mask_S: Tensor) -> Tensor:
        """Return [S] bool: the first sequence of each episode that is in the mask [S].

        What counts responses, such as the mean reward, or the statistics of a group, counts these: all sequences of an
        episode have its reward.
        """
        return first_of_each(self.episode_index(), mask_S) if EPISODE in self else mask_S

    def of_whole_episodes(self, mask_S: Tensor) -> Tensor:
        """Return [S] bool: all sequences of the episodes that have one in the mask [S]."""
        index_S = self.episode_index()
        return torch.isin(index_S, index_S[mask_S])

    def sequences(self, key: str = TOKENS) -> tuple[Tensor, ...]:
        """Return views of the sequences of `key`, in prompt order."""
        lengths = self.lengths[self._check_key(key)].flat.tolist()
        return torch.split(self.data[key], lengths) if lengths else ()

    def unpack(self) -> list[SequenceSample]:
        """Split into one sample per prompt."""
        return [self._between(i, i + 1) for i in range(len(self.ids))]

    def __repr__(self) -> str:
        head = f"SequenceSample({len(self.ids)} prompts: {some(self.ids)})"
        lines = [f"  {key:<16} {describe(self.data[key], n)}" for key, n in self.lengths.items()]
        lines += [f"  {key:<16} one object per prompt" for key in self.metadata]
        return "\n".join([head, *lines])

    def select(self, keys: Iterable[str]) -> SequenceSample:
        """Return a sample with only these keys.

        `input_ids` keeps what says whose tokens they are (`INDEX_KEYS`), and tokens keep the images of their prompts
        (`IMAGE_KEYS`).
        """
        wanted = set(keys)
        if wanted & _WITH_IMAGES:
            wanted |= self.data.keys() & set(IMAGE_KEYS)
        if TOKENS in wanted:
            wanted |= self.data.keys() & set(INDEX_KEYS)
        for key in sorted(wanted - self.metadata.keys()):
            self._check_key(key)
        return replace(
            self,
            data={k: v for k, v in self.data.items() if k in wanted},
            lengths={k: v for k, v in self.lengths.items() if k in wanted},
            metadata={k: v for k, v in self.metadata.items() if k in wanted},
        )

    def rename(self, names: Mapping[str, str]) -> SequenceSample:
        """Rename keys (`{old: new}`). Other keys keep their names."""
        for old in names:
            if old not in self.metadata:
                self._check_key(old)
        new = {k: names.get(k, k) for k in (*self.data, *self.metadata)}
        if len(set(new.values())) != len(new):
            raise ValueError(
                f"rename {dict(names)} gives two keys the same name (keys: {', '.join(sorted(self.keys))})"
            )
        return replace(
            self,
            data={new[k]: v for k, v in self.data.items()},
            lengths={new[k]: v for k, v in self.lengths.items()},
            metadata={new[k]: v for k, v in self.metadata.items()},
        )

    def merge(self, other: SequenceSample) -> SequenceSample:
        """Combine the keys of two samples, which must have the same ids in the same order."""
        if self.ids != other.ids:
            raise ValueError(
                f"merge needs the same ids in the same order. Found {some(self.ids)} and {some(other.ids)}"
            )
        if both := self.keys & other.keys:
            raise ValueError(f"merge: key {min(both)!r} is in both samples. Rename or drop one of them")
        return replace(
            self,
            data={**self.data, **other.data},
            lengths={**self.lengths, **other.lengths},
            metadata={**self.metadata, **other.metadata},
        )

    def take(self, prompts: Sequence[int] | IntArray) -> SequenceSample:
        """Select the prompts at these positions, in this order, each with all of its sequences."""
        chosen = as_indices("take: prompts", prompts, len(self.ids))
        return self._take(chosen, lambda key: self.lengths[key].sequences_of(chosen))

    def take_sequences(self, sequences: Sequence[int] | IntArray, key: str = TOKENS) -> SequenceSample:
        """Select sequences (ascending indices into the sequences of `key`), with their prompts.

        Also selects these sequences of the keys with as many sequences per prompt as `key`. Keeps keys with one
        sequence per prompt unchanged.

        Raises:
            ValueError: the indices do not ascend, or a key of a partly selected group has another number of
                sequences.
        """
        main = self.lengths[self._check_key(key)]
        chosen = as_indices("take_sequences: sequences", sequences, len(main.flat))
        if (np.diff(chosen) <= 0).any():
            raise ValueError(f"take_sequences: indices must be strictly ascending, found {chosen.tolist()[:10]}")
        prompts, counts = np.unique(main.prompt_of_sequence[chosen], return_counts=True)
        cut = prompts[counts < main.counts[prompts]]

        def of_key(name: str) -> tuple[IntArray, IntArray]:
            lengths = self.lengths[name]
            if lengths.same_sequences(main):
                return chosen, counts
            if len(odd := cut[lengths.counts[cut] != 1]):
                raise ValueError(
                    f"key {name!r}, id {self.ids[odd[0]]!r}: {int(lengths.counts[odd[0]])} sequences cannot be split "
                    f"like the {int(main.counts[odd[0]])} of {key!r}"
                )
            return lengths.sequences_of(prompts)

        return self._take(prompts, of_key)

    def _take(self, prompts: IntArray, of_key: Callable[[str], tuple[IntArray, IntArray]]) -> SequenceSample:
        data: dict[str, Tensor] = {}
        lengths: dict[str, Lengths] = {}
        shared: dict[int, tuple[Lengths, Rows]] = {}  # keys that share a Lengths object share an index
        for key, cut in self.lengths.items():
            if id(cut) not in shared:
                sequences, counts = of_key(key)
                shared[id(cut)] = (cut.take(sequences, counts), cut.rows(sequences))
            lengths[key], rows = shared[id(cut)]
            data[key] = pick(self.data[key], rows)
        chosen = prompts.tolist()
        return SequenceSample(
            tuple(self.ids[i] for i in chosen),
            data,
            lengths,
            {k: tuple(v[i] for i in chosen) for k, v in self.metadata.items()},
        )

    def _between(self, start: int, stop: int) -> SequenceSample:
        """Return the prompts from `start` up to (excluding) `stop`, as views."""
        distinct = {id(cut): cut for cut in self.lengths.values()}
        cuts = {same: cut.between(start, stop) for same, cut in distinct.items()}
        data = {}
        for key, cut in self.lengths.items():
            first, last = cut.starts[cut.sequence_starts[[start, stop]]].tolist()
            data[key] = self.data[key][first:last]
        return SequenceSample(
            self.ids[start:stop],
            data,
            {key: cuts[id(cut)] for key, cut in self.lengths.items()},
            {k: v[start:stop] for k, v in self.metadata.items()},
        )

    def chunks(self, n: int) -> list[SequenceSample]:
        """Split into `n` contiguous chunks of prompts whose sizes differ by at most one."""
        if not isinstance(n, int | np.integer) or isinstance(n, bool) or not 1 <= n <= len(self.ids):
            raise ValueError(f"cannot split {len(self.ids)} prompts into {n} parts")
        size, larger = divmod(len(self.ids), n)
        ends = [i * size + min(i, larger) for i in range(n + 1)]
        return [self._between(start, stop) for start, stop in pairwise(ends)]

    def minibatches(self, n: int, rng: np.random.Generator) -> list[SequenceSample]:
        """Randomly permute the prompts and split them into `n` mini-batches for one epoch of optimizer steps.

        With fewer than `n` prompts, which dynamic sampling can cause, returns one mini-batch per prompt.
        """
        return self.take(rng.permutation(len(self.ids))).chunks(min(n, len(self.ids)))

    def split(
        self, spec: MicroBatchSpec, key: str = TOKENS, prefixes: IntArray | None = None
    ) -> MicroBatches[SequenceSample]:
        """Split into micro-batches by the token budget of `spec`, which counts tokens of `key`.

        See `plan_microbatches`.
        """
        plan = plan_microbatches(self.lengths[self._check_key(key)], spec, self.ids, prefixes)
        return MicroBatches(self, key, tuple(plan), tuple(self.take_sequences(p, key) for p in plan))

    def to(self, device: torch.device | str) -> SequenceSample:
        """Return the same sample with its tensors on `device`."""
        return replace(self, data={key: on_device(x, device) for key, x in self.data.items()})

    def meta(self) -> SequenceSample:
        """Return the same sample with its tensors on the meta device, which have only a shape and a dtype."""
        return self.to("meta")


def on_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor on a device, without waiting for the copy of a tensor from the host.

    The device reads pinned memory while the host goes on, and torch keeps that memory until it has been read. A copy to
    the host waits, since it could be read too early.
    """
    target = torch.device(device).type
    if x.device.type != "cpu" or target in ("cpu", "meta"):
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def with_response_index(data: SequenceSample) -> SequenceSample:
    """Return a whole batch with `response_index`: its own, or else the place of each sequence in its prompt.

    Call it where tokens are made, before any sequence is left out.
    """
    if TOKENS not in data or RESPONSE_INDEX in data:
        return data
    lengths = data.lengths[TOKENS]
    place_S = np.arange(len(lengths.flat)) - lengths.sequence_starts[lengths.prompt_of_sequence]
    return data.with_sequences(**{RESPONSE_INDEX: torch.from_numpy(place_S).to(data[TOKENS].device)})


def with_own_metadata(data: SequenceSample) -> SequenceSample:
    """Return a batch whose receiver may change its rows: they are copies, each for itself."""
    return data.with_metadata(**{key: [deepcopy(x) for x in objects] for key, objects in data.metadata.items()})


def part_sizes(n: int, parts: int) -> str:
    """Format the chunk sizes of `SequenceSample.chunks` for messages: "4", or "2 or 3"."""
    smallest, larger = divmod(n, parts)
    return f"{smallest} or {smallest + 1}" if larger else str(smallest)


def _as_ids(ids: Iterable[Hashable]) -> tuple[Hashable, ...]:
    """Return the ids as a tuple.

    Raises:
        ValueError: an id is not hashable, or occurs twice.
    """
    ids = tuple(ids)
    try:
        if len(set(ids)) == len(ids):
            return ids
    except TypeError as error:
        raise ValueError(f"ids must be hashable, such as text or numbers ({error}). Found {some(ids)}") from error
    repeated, times = Counter(ids).most_common(1)[0]
    raise ValueError(f"Duplicate id {repeated!r} ({times} occurrences). Ids must be unique")


def _as_metadata(key: str, values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the metadata of a key as a tuple with one object per prompt.

    Raises:
        ValueError: `values` is not a sequence of objects.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise ValueError(f"metadata {key!r} must be a list with one object per prompt, found {type(values).__name__}")
    return tuple(values)


def _check_packed(key: str, x: object, lengths: object, ids: Sequence[Hashable]) -> None:
    """Check that a packed tensor has the rows that its lengths state for these ids.

    Raises:
        ValueError: it is not a packed tensor, or the numbers of prompts or rows differ.
    """
    if not isinstance(x, Tensor) or not x.ndim:
        kind = "a tensor without dimensions" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"key {key!r} must be a packed tensor, found {kind}")
    if not isinstance(lengths, Lengths):
        raise ValueError(f"the lengths of key {key!r} must be Lengths, found {type(lengths).__name__}")
    if len(lengths.counts) != len(ids):
        raise ValueError(f"key {key!r} has lengths of {len(lengths.counts)} prompts, expected {len(ids)} (ids)")
    if (rows := x.shape[0]) != lengths.total:
        ends = lengths.starts[lengths.sequence_starts[1:]]
        first = int(np.searchsorted(ends, rows, side="right")) if rows < lengths.total else len(ids) - 1
        where = f". Id {ids[first]!r} should end at row {int(ends[first])}" if ids else ""
        raise ValueError(f"key {key!r} has {rows} rows, but its lengths sum to {lengths.total}{where}")


def as_indices(name: str, values: object, n: int) -> IntArray:
    """Return indices as an array.

    Raises:
        ValueError: an index is not an integer from 0 to `n - 1`.
    """
    chosen = as_integers(name, values)
    if chosen.size and (chosen.min() < 0 or chosen.max() >= n):
        raise ValueError(f"{name} must be indices from 0 to {n - 1}, found {chosen.min()} to {chosen.max()}")
    return chosen


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
    return Shards(data, key, plan)


def _plan(tokens: IntArray, n: int) -> tuple[IntArray, ...]:
    """Return, for each rank, the ascending positions of its prompts."""
    heap = [(0, 0, rank) for rank in range(n)]  # tokens, prompts (to balance prompts without tokens too), rank
    ranks = np.zeros(len(tokens), dtype=np.int64)
    # Stable, since the order of ties of numpy's default sort depends on the CPU.
    for prompt in np.argsort(-tokens, kind="stable").tolist():
        load, prompts, ranks[prompt] = heap[0]
        heapq.heapreplace(heap, (load + int(tokens[prompt]), prompts + 1, int(ranks[prompt])))
    return tuple(np.flatnonzero(ranks == rank) for rank in range(n))


@dataclass(frozen=True, eq=False, repr=False)
class Shards(Sequence[SequenceSample]):
    """The parts of a batch, one per rank, and the inverse of the sharding.

    A part has all keys and metadata of its prompts, and may have no prompts. It is taken when it is read: a rank then
    copies its own part only.

    Attributes:
        batch: the sharded batch.
        key: key whose tokens were counted.
        plan: for each rank, the ascending positions of its prompts.
    """

    batch: SequenceSample
    key: str
    plan: tuple[IntArray, ...]

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.batch.take(prompts) for prompts in self.plan[index]]
        return self.batch.take(self.plan[index])

    def __repr__(self) -> str:
        tokens = self.batch.lengths[self.key].per_prompt
        return f"Shards(tokens of {self.key!r}: {[int(tokens[prompts].sum()) for prompts in self.plan]})"

    def restore(self, parts: Sequence[SequenceSample]) -> SequenceSample:
        """Combine results, one sample per rank with the prompts of its part, in the order of the batch.

        Args:
            parts: results in rank order, with the same keys and any lengths. The result of a part without sequences
                may have no keys.

        Raises:
            ValueError: a result has other prompts than its part, or lacks a key of the other results.
        """
        if len(parts) != len(self):
            raise ValueError(f"restore got {len(parts)} results for {len(self)} ranks")
        for rank, (result, prompts) in enumerate(zip(parts, self.plan, strict=True)):
            if result.ids != (asked := tuple(self.batch.ids[i] for i in prompts.tolist())):
                raise ValueError(f"restore got ids {some(result.ids)} for rank {rank}, whose part has {some(asked)}")
        # A rank without sequences may return no keys; it gets empty ones, since `gather` needs equal keys.
        known = next((part for part in parts if part.keys), parts[0])
        counts = self.batch.lengths[self.key].counts
        pairs = zip(parts, self.plan, strict=True)
        full = [_empty_like(known, a.ids) if not (a.keys or counts[prompts].any()) else a for a, prompts in pairs]
        return SequenceSample.gather(full).take(np.argsort(np.concatenate(self.plan)))


def _empty_like(known: SequenceSample, ids: tuple[Hashable, ...]) -> SequenceSample:
    """Return prompts without sequences, with the keys of another sample."""
    lengths = Lengths(np.zeros(len(ids), dtype=np.int64), np.zeros(0, dtype=np.int64))
    metadata = {} if ids else dict.fromkeys(known.metadata, ())
    return SequenceSample(ids, {k: x[:0] for k, x in known.data.items()}, dict.fromkeys(known.data, lengths), metadata)

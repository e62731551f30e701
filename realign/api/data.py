"""`SequenceSample`: a batch of prompts, each with its sequences, as packed 1-D tensors.

T = packed tokens, S = sequences. Everything about token t stands at index t; lengths are the only truth. The ids are
the prompts: the unit that is shuffled and cut, always with all of its sequences.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from realign.api.lengths import IntArray, Lengths, Rows, pick
from realign.api.microbatch import MicroBatchSpec, plan_microbatches

Nested: TypeAlias = Sequence[Sequence[Tensor | Sequence[int] | Sequence[float]]]
TOKENS = "input_ids"


@dataclass(frozen=True, eq=False, repr=False)
class SequenceSample:
    """A batch of prompts with packed tensors of any lengths; immutable, checked when built.

    Attributes:
        ids: one per prompt, distinct.
        data: packed tensor by key; the first dimension is packed, others are free.
        lengths: how each key is cut, by key.
        metadata: by key, one Python object per prompt (a row of the dataset, say).

    Raises:
        ValueError: names the key, the id, the length found and the length expected.
    """

    ids: tuple[Hashable, ...]
    data: Mapping[str, Tensor] = field(default_factory=dict)
    lengths: Mapping[str, Lengths] = field(default_factory=dict)
    metadata: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("data", "lengths", "metadata"):
            object.__setattr__(self, name, dict(getattr(self, name)))
        if len(set(self.ids)) != len(self.ids):
            repeated = next(i for i in self.ids if self.ids.count(i) > 1)
            raise ValueError(f"id {repeated!r} stands {self.ids.count(repeated)} times; ids must be distinct")
        if self.data.keys() != self.lengths.keys():
            raise ValueError(f"keys with data {sorted(self.data)} and keys with lengths {sorted(self.lengths)} differ")
        if both := self.data.keys() & self.metadata.keys():
            raise ValueError(f"key {min(both)!r} stands in data and in metadata")
        for key, lengths in self.lengths.items():
            self._check_key(key, lengths)
        for key, objects in self.metadata.items():
            if len(objects) != len(self.ids):
                raise ValueError(f"metadata {key!r} has {len(objects)} entries for {len(self.ids)} ids")

    def _check_key(self, key: str, lengths: Lengths) -> None:
        if len(lengths.counts) != len(self.ids):
            raise ValueError(
                f"key {key!r} has lengths of {len(lengths.counts)} prompts, expected {len(self.ids)} (ids)"
            )
        rows = self.data[key].shape[0] if self.data[key].ndim else 0
        if rows != lengths.total:
            ends = lengths.starts[lengths.sequence_starts[1:]]
            first = int(np.searchsorted(ends, rows, side="right")) if rows < lengths.total else len(self.ids) - 1
            where = f"; id {self.ids[first]!r} should end at row {int(ends[first])}" if self.ids else ""
            raise ValueError(f"key {key!r} has {rows} rows, expected {lengths.total} by its lengths{where}")

    # --- building ---

    @classmethod
    def from_sequences(
        cls,
        ids: Sequence[Hashable],
        data: Mapping[str, Nested],
        metadata: Mapping[str, Sequence[Any]] | None = None,
    ) -> SequenceSample:
        """Pack nested sequences: for each key one list per prompt, holding one tensor or list per sequence."""
        sample = cls(tuple(ids), metadata={k: tuple(v) for k, v in (metadata or {}).items()})
        for key, nested in data.items():
            if len(nested) != len(ids):
                raise ValueError(f"key {key!r} has sequences of {len(nested)} prompts, expected {len(ids)} (ids)")
            tensors = [[torch.as_tensor(sequence) for sequence in sequences] for sequences in nested]
            flat = [t for sequences in tensors for t in sequences]
            lengths = Lengths.of([[len(t) for t in sequences] for sequences in tensors])
            sample = sample.with_data({key: torch.cat(flat) if flat else torch.empty(0)}, lengths=lengths)
        return sample

    @classmethod
    def gather(cls, samples: Sequence[SequenceSample]) -> SequenceSample:
        """Concatenate batches of distinct prompts that hold the same keys."""
        if not samples:
            raise ValueError("gather needs at least one sample")
        keys = set().union(*(s.keys for s in samples))
        for s in samples:
            if missing := keys - s.keys:
                raise ValueError(f"key {min(missing)!r} is absent for ids {_some(s.ids)}, but present for others")
        first = samples[0]
        joined: dict[tuple[int, ...], Lengths] = {}  # keys that share their lengths go on sharing them
        lengths = {}
        for k in first.data:
            parts = [s.lengths[k] for s in samples]
            lengths[k] = joined.setdefault(tuple(map(id, parts)), Lengths.join(parts))
        return cls(
            ids=tuple(i for s in samples for i in s.ids),
            data={k: torch.cat([s.data[k] for s in samples]) for k in first.data},
            lengths=lengths,
            metadata={k: tuple(x for s in samples for x in s.metadata[k]) for k in first.metadata},
        )

    def with_data(
        self, data: Mapping[str, Tensor | Nested], *, like: str | None = None, lengths: Lengths | None = None
    ) -> SequenceSample:
        """Add (or replace) keys cut like the key `like`, or by `lengths` of their own.

        Raises:
            ValueError: a value does not have these lengths; nested values name the id that differs.
        """
        if (like is None) == (lengths is None):
            raise ValueError("with_data needs exactly one of `like` (a key) and `lengths`")
        cut = lengths if lengths is not None else self.lengths[self._known(like or "")]
        packed = {k: v if isinstance(v, Tensor) else self._pack(k, v, cut) for k, v in data.items()}
        return replace(self, data={**self.data, **packed}, lengths={**self.lengths, **dict.fromkeys(data, cut)})

    def with_tokens(self, **data: Tensor | Nested) -> SequenceSample:
        """Add keys that have one element for each token of `input_ids`."""
        return self.with_data(data, like=TOKENS)

    def with_sequences(self, **data: Tensor | Nested) -> SequenceSample:
        """Add keys that have one element for each sequence of `input_ids`."""
        return self.with_data(data, lengths=self.lengths[self._known(TOKENS)].ones())

    def with_metadata(self, **metadata: Sequence[Any]) -> SequenceSample:
        """Add keys that hold one Python object per prompt."""
        return replace(self, metadata={**self.metadata, **{k: tuple(v) for k, v in metadata.items()}})

    def _pack(self, key: str, nested: Nested, cut: Lengths) -> Tensor:
        found = Lengths.of([[len(sequence) for sequence in sequences] for sequences in nested])
        if found != cut:
            for i, got, want in zip(self.ids, found.nested(), cut.nested(), strict=False):
                if got != want:
                    raise ValueError(f"key {key!r}, id {i!r}: lengths {list(got)}, expected {list(want)}")
            raise ValueError(
                f"key {key!r} has sequences of {len(found.counts)} prompts, expected {len(self.ids)} (ids)"
            )
        return torch.cat([torch.as_tensor(sequence) for sequences in nested for sequence in sequences])

    # --- looking ---

    @property
    def keys(self) -> set[str]:
        """Names of everything held: packed tensors and metadata."""
        return {*self.data, *self.metadata}

    def __contains__(self, key: object) -> bool:
        return key in self.data or key in self.metadata

    def __getitem__(self, key: str) -> Tensor:
        return self.data[self._known(key)]

    def get(self, key: str) -> Tensor | None:
        """The packed tensor of an optional key, or None."""
        return self.data.get(key)

    def _known(self, key: str) -> str:
        if key not in self.data:
            near = difflib.get_close_matches(key, self.data, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"no packed key {key!r}; there are {sorted(self.data)}{hint}")
        return key

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def n_sequences(self) -> int:
        """Number of sequences of `input_ids`."""
        return len(self.lengths[self._known(TOKENS)].flat)

    def cu_seqlens(self, key: str = TOKENS) -> Tensor:
        """int32 [S + 1] boundaries of the sequences of `key`, with a leading 0, on the device of `key`."""
        starts = self.lengths[self._known(key)].starts
        return torch.from_numpy(starts.astype(np.int32)).to(self.data[key].device)

    def group_index(self, key: str = TOKENS) -> Tensor:
        """int64 [S] index of the prompt of each sequence of `key`: groups are found by id, never by position."""
        owners = self.lengths[self._known(key)].prompt_of_sequence
        return torch.from_numpy(owners.copy()).to(self.data[key].device)

    def sequences(self, key: str = TOKENS) -> tuple[Tensor, ...]:
        """Views of the sequences of `key`, prompt after prompt."""
        return torch.split(self.data[self._known(key)], self.lengths[key].flat.tolist())

    def unpack(self) -> list[SequenceSample]:
        """One sample per prompt."""
        return [self.take([i]) for i in range(len(self.ids))]

    def __repr__(self) -> str:
        head = f"SequenceSample({len(self.ids)} prompts: {_some(self.ids)})"
        lines = [f"  {key:<16} {_describe(self.data[key], n)}" for key, n in self.lengths.items()]
        lines += [f"  {key:<16} one object per prompt" for key in self.metadata]
        return "\n".join([head, *lines])

    # --- choosing ---

    def select(self, keys: Iterable[str]) -> SequenceSample:
        """Only these keys."""
        wanted = set(keys)
        for key in sorted(wanted - self.metadata.keys()):
            self._known(key)
        return replace(
            self,
            data={k: v for k, v in self.data.items() if k in wanted},
            lengths={k: v for k, v in self.lengths.items() if k in wanted},
            metadata={k: v for k, v in self.metadata.items() if k in wanted},
        )

    def rename(self, names: Mapping[str, str]) -> SequenceSample:
        """The same data under other keys (`{old: new}`); keys not named keep theirs."""
        for old in names:
            if old not in self.metadata:
                self._known(old)
        new = {k: names.get(k, k) for k in (*self.data, *self.metadata)}
        if len(set(new.values())) != len(new):
            raise ValueError(f"rename {dict(names)} would give two keys one name; there are {sorted(self.keys)}")
        return replace(
            self,
            data={new[k]: v for k, v in self.data.items()},
            lengths={new[k]: v for k, v in self.lengths.items()},
            metadata={new[k]: v for k, v in self.metadata.items()},
        )

    def merge(self, other: SequenceSample) -> SequenceSample:
        """The keys of both samples, which must be of the same prompts in the same order."""
        if self.ids != other.ids:
            raise ValueError(
                f"merge needs the same ids in the same order; found {_some(self.ids)} and {_some(other.ids)}"
            )
        if both := self.keys & other.keys:
            raise ValueError(f"merge: key {min(both)!r} stands in both samples")
        return replace(
            self,
            data={**self.data, **other.data},
            lengths={**self.lengths, **other.lengths},
            metadata={**self.metadata, **other.metadata},
        )

    def take(self, prompts: Sequence[int] | IntArray) -> SequenceSample:
        """The prompts at these positions, in this order, each with all of its sequences."""
        chosen = np.asarray(prompts, dtype=np.int64)
        return self._take(chosen, lambda key: _sequences_of(self.lengths[key], chosen))

    def take_sequences(self, sequences: Sequence[int] | IntArray, key: str = TOKENS) -> SequenceSample:
        """Only these sequences (ascending indices into the sequences of `key`), with their prompts.

        Keys that have as many sequences per prompt as `key` are cut with it; keys with one per prompt are kept whole.

        Raises:
            ValueError: a group is cut that holds a key of another number of sequences.
        """
        chosen = np.asarray(sequences, dtype=np.int64)
        main = self.lengths[self._known(key)]
        prompts, counts = np.unique(main.prompt_of_sequence[chosen], return_counts=True)
        cut = prompts[counts < main.counts[prompts]]

        def of_key(name: str) -> tuple[IntArray, IntArray]:
            lengths = self.lengths[name]
            if lengths.same_sequences(main):
                return chosen, counts
            if len(odd := cut[lengths.counts[cut] != 1]):
                raise ValueError(
                    f"key {name!r}, id {self.ids[odd[0]]!r}: {int(lengths.counts[odd[0]])} sequences cannot be cut "
                    f"along with the {int(main.counts[odd[0]])} of {key!r}"
                )
            return _sequences_of(lengths, prompts)

        return self._take(prompts, of_key)

    def _take(self, prompts: IntArray, of_key: Callable[[str], tuple[IntArray, IntArray]]) -> SequenceSample:
        data: dict[str, Tensor] = {}
        lengths: dict[str, Lengths] = {}
        shared: dict[int, tuple[Lengths, Rows]] = {}  # keys with one Lengths object need one index
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

    def chunks(self, n: int) -> list[SequenceSample]:
        """Cut into `n` runs of prompts whose sizes differ by one at most; every prompt stands in exactly one."""
        if not 1 <= n <= len(self.ids):
            raise ValueError(f"cannot cut {len(self.ids)} prompts into {n} parts")
        return [self.take(part) for part in np.array_split(np.arange(len(self.ids)), n)]

    def split(self, spec: MicroBatchSpec, key: str = TOKENS) -> MicroBatches:
        """Cut into micro-batches by the token budget of `spec`, counted on `key`."""
        plan = plan_microbatches(self.lengths[self._known(key)], spec)
        return MicroBatches(self, key, tuple(plan), tuple(self.take_sequences(p, key) for p in plan))

    def to(self, device: torch.device | str) -> SequenceSample:
        """The same sample with its tensors on `device`."""
        return replace(self, data={k: v.to(device, non_blocking=True) for k, v in self.data.items()})

    def meta(self) -> SequenceSample:
        """The same sample without content: tensors of the meta device, which have a shape and a dtype only."""
        return self.to("meta")


@dataclass(frozen=True, eq=False)
class MicroBatches(Sequence[SequenceSample]):
    """The micro-batches of a sample, and the way back to its order."""

    whole: SequenceSample
    key: str
    plan: tuple[IntArray, ...]
    parts: tuple[SequenceSample, ...]

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: Any) -> Any:
        return self.parts[index]

    def __iter__(self) -> Iterator[SequenceSample]:
        return iter(self.parts)

    def restore(self, parts: Sequence[SequenceSample]) -> SequenceSample:
        """Put results, one sample per micro-batch with the micro-batch's sequences, back into the order of the whole.

        Args:
            parts: for each micro-batch a sample of the same ids; each key has one sequence for each sequence of the
                micro-batch (any lengths: per token, one per sequence, ...).

        Raises:
            ValueError: a key has another number of sequences than the micro-batch.
        """
        if len(parts) != len(self.parts):
            raise ValueError(f"restore got {len(parts)} parts of {len(self.parts)} micro-batches")
        cut = self.whole.lengths[self.key]
        out = SequenceSample(self.whole.ids)
        if not parts:
            return out
        back = np.argsort(np.concatenate(self.plan), kind="stable")
        for name in parts[0].data:
            for part, asked in zip(parts, self.parts, strict=True):
                if not part.lengths[name].same_sequences(asked.lengths[self.key]):
                    raise ValueError(
                        f"key {name!r} has {len(part.lengths[name].flat)} sequences for the "
                        f"{len(asked.lengths[self.key].flat)} of the micro-batch with ids {_some(asked.ids)}"
                    )
            joined = Lengths.join([part.lengths[name] for part in parts])
            x = pick(torch.cat([part.data[name] for part in parts]), joined.rows(back))
            out = out.with_data({name: x}, lengths=Lengths(cut.counts, joined.flat[back]))
        return out


def _sequences_of(lengths: Lengths, prompts: IntArray) -> tuple[IntArray, IntArray]:
    """Indices of all sequences of these prompts, and how many each has."""
    counts = lengths.counts[prompts]
    first = lengths.sequence_starts[:-1][prompts]
    offset = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) + np.repeat(first - offset, counts), counts


def _some(ids: Sequence[Hashable]) -> str:
    return ", ".join(map(repr, ids[:3])) + (f", ... ({len(ids)} in all)" if len(ids) > 3 else "")


def _describe(x: Tensor, lengths: Lengths) -> str:
    shape, dtype = list(x.shape), str(x.dtype).removeprefix("torch.")
    n = lengths.flat
    cut = f"{len(n)} sequences of {n.min()} to {n.max()}, mean {n.mean():.1f}" if len(n) else "no sequences"
    return f"{shape!s:<12} {dtype:<8} {cut}"

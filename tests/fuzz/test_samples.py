"""Fuzz `Lengths` and `SequenceSample` with arbitrary arguments.

Oracle: plain Python over nested lists. Accepted samples contain exactly the values of the lists. All valid lists are
accepted.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from realign.api import Lengths, SequenceSample
from tests.fuzz.refusals import BOUNDED, JUNK, LARGEST, NUMBERS, Refused, attempt

KEYS = st.one_of(st.sampled_from(["input_ids", "loss_mask", "rewards", ""]), st.just(3))
IDS = st.lists(st.one_of(st.sampled_from(["a", "b", "c"]), st.integers(0, 2), st.none(), st.just([1])), max_size=4)
PROMPTS = st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=4)
"""Lengths of the sequences of each prompt."""


def fits(counts: Any, flat: Any) -> bool:
    """Return whether these are valid lengths."""
    for values in (counts, flat):
        if not isinstance(values, list) or not all(type(x) is int and 0 <= x <= LARGEST for x in values):
            return False
    return sum(counts) == len(flat) and sum(flat) <= LARGEST


@BOUNDED
@given(st.one_of(st.lists(NUMBERS, max_size=4), JUNK), st.one_of(st.lists(NUMBERS, max_size=4), JUNK))
@example([4], [2**62] * 4)  # the sum would overflow to 0
@example([2**63, 2**63], [])
def test_lengths_are_taken_or_refused(counts, flat):
    outcome = attempt(lambda: Lengths(counts, flat), "Lengths")
    if isinstance(outcome, Refused):
        assert not fits(counts, flat), outcome.message
        return
    plain = [x.tolist() if hasattr(x, "tolist") else list(x) for x in (counts, flat)]
    assert fits(*plain)
    assert outcome.total == sum(plain[1])
    assert outcome.starts.tolist() == [sum(plain[1][:i]) for i in range(len(plain[1]) + 1)]
    assert [len(group) for group in outcome.as_tuples()] == plain[0]


@BOUNDED
@given(
    IDS,
    st.dictionaries(KEYS, st.one_of(st.integers(0, 6).map(torch.arange), JUNK), max_size=3),
    st.dictionaries(KEYS, st.one_of(PROMPTS.map(Lengths.of), JUNK), max_size=3),
    st.dictionaries(KEYS, st.one_of(st.lists(st.integers(), max_size=4), JUNK), max_size=2),
)
def test_a_sample_is_built_whole_or_refused(ids, data, lengths, metadata):
    outcome = attempt(lambda: SequenceSample(tuple(ids), data, lengths, metadata), "id", "key", "metadata")
    whole = (
        all(not isinstance(i, list) for i in ids)
        and len(set(map(repr, ids))) == len(ids)
        and data.keys() == lengths.keys()
        and all(isinstance(key, str) for key in [*data, *metadata])
        and not data.keys() & metadata.keys()
        and all(isinstance(x, torch.Tensor) and x.ndim for x in data.values())
        and all(isinstance(cut, Lengths) and len(cut.counts) == len(ids) for cut in lengths.values())
        and all(lengths[key].total == len(x) for key, x in data.items())
        and all(isinstance(x, list) and len(x) == len(ids) for x in metadata.values())
    )
    assert isinstance(outcome, Refused) != whole, getattr(outcome, "message", (ids, data, lengths, metadata))


ROWS = st.lists(st.one_of(NUMBERS, st.none(), st.text(max_size=2), st.just([1])), max_size=3)
NESTED = st.lists(
    st.one_of(st.lists(st.one_of(ROWS, st.integers(0, 3).map(torch.ones), JUNK), max_size=2), JUNK), max_size=3
)


@BOUNDED
@given(st.one_of(NESTED, JUNK))
def test_nested_sequences_come_back_as_they_were_or_are_refused(nested):
    ids = [f"p{i}" for i in range(len(nested))] if isinstance(nested, list) else ["p0"]
    outcome = attempt(lambda: SequenceSample.from_sequences(ids, {"input_ids": nested}), "'input_ids'")
    if isinstance(outcome, Refused):
        integers = isinstance(nested, list) and all(
            isinstance(group, list)
            and all(isinstance(s, list) and all(type(x) is int and abs(x) < 2**63 for x in s) for s in group)
            for group in nested
        )
        assert not integers, outcome.message
        return
    for prompt, group in zip(outcome.unpack(), nested, strict=True):
        for sequence, given_ in zip(prompt.sequences(), group, strict=True):
            expected = torch.as_tensor(given_)
            assert sequence.shape == expected.shape
            assert torch.equal(sequence.double().nan_to_num(7.25), expected.double().nan_to_num(7.25))
            if all(type(x) is int for x in given_) and not sequence.is_floating_point():
                assert sequence.tolist() == list(given_)  # the conversion keeps all digits


class Plain:
    """Sample as nested lists: for each key and each prompt, its sequences."""

    def __init__(self, ids: list[str], data: dict[str, list[list[list[int]]]], rows: list[int]) -> None:
        self.ids, self.data, self.rows = ids, data, rows

    def packed(self) -> SequenceSample:
        """Return the same data as a sample."""
        nested = {
            key: [[torch.tensor(s, dtype=torch.int64) for s in group] for group in groups]
            for key, groups in self.data.items()
        }
        return SequenceSample.from_sequences(self.ids, nested, {"row": self.rows})

    def take(self, at: list[int]) -> Plain:
        """Return the prompts at these indices."""
        data = {key: [groups[i] for i in at] for key, groups in self.data.items()}
        return Plain([self.ids[i] for i in at], data, [self.rows[i] for i in at])

    def assert_same(self, sample: SequenceSample) -> None:
        """Compare all data with a sample."""
        assert list(sample.ids) == self.ids
        assert set(sample.data) == set(self.data)
        assert list(sample.metadata.get("row", self.rows)) == self.rows
        for key, groups in self.data.items():
            flat = [x.tolist() for x in sample.sequences(key)]
            assert flat == [s for group in groups for s in group]
            assert sample.lengths[key].counts.tolist() == [len(group) for group in groups]
            assert sample.group_index(key).tolist() == [i for i, group in enumerate(groups) for _ in group]
            assert sample.cu_seqlens(key).tolist() == [sum(map(len, flat[:i])) for i in range(len(flat) + 1)]


@st.composite
def plain_samples(draw: Any) -> Plain:
    """Draw some prompts. `mask` has the lengths of `input_ids`, `score` one element per sequence, and `free` any
    lengths."""
    shapes, free = draw(PROMPTS), draw(PROMPTS)
    free = (free + [[]] * len(shapes))[: len(shapes)]
    count = iter(range(1000))

    def filled(lengths: list[list[int]]) -> list[list[list[int]]]:
        return [[[next(count) for _ in range(n)] for n in group] for group in lengths]

    data = {
        "input_ids": filled(shapes),
        "mask": filled(shapes),
        "score": filled([[1] * len(g) for g in shapes]),
        "free": filled(free),
    }
    return Plain([f"p{i}" for i in range(len(shapes))], data, list(range(len(shapes))))


INDICES = st.one_of(st.lists(st.integers(-2, 6), max_size=5), st.lists(NUMBERS, max_size=3), JUNK)


def as_indices(values: Any, n: int) -> list[int] | None:
    """Return indices below n, or None if the values are not such indices."""
    plain = values.tolist() if hasattr(values, "tolist") else values
    good = isinstance(plain, list) and all(type(i) is int and 0 <= i < n for i in plain)
    return plain if good else None


@BOUNDED
@given(plain_samples(), INDICES)
def test_taking_prompts(plain, at):
    outcome = attempt(lambda: plain.packed().take(at), "take: prompts", "Duplicate id")
    wanted = as_indices(at, len(plain.ids))
    possible = wanted is not None and len(set(wanted)) == len(wanted)
    assert isinstance(outcome, Refused) != possible, getattr(outcome, "message", at)
    if possible:
        plain.take(wanted).assert_same(outcome)


NAMES = st.one_of(st.sampled_from(["input_ids", "mask", "score", "free", "row", "inptu_ids", ""]), st.text(max_size=2))


@BOUNDED
@given(plain_samples(), st.lists(NAMES, max_size=4), st.dictionaries(NAMES, NAMES, max_size=3))
def test_selecting_and_renaming_keys(plain, keys, names):
    sample = plain.packed()
    known = {*plain.data, "row"}
    outcome = attempt(lambda: sample.select(keys), "no packed key")
    assert isinstance(outcome, Refused) != (set(keys) <= known)
    if not isinstance(outcome, Refused):
        assert outcome.keys == set(keys)
    outcome = attempt(lambda: sample.rename(names), "no packed key", "rename")
    after = [names.get(key, key) for key in sorted(known)]
    possible = set(names) <= known and len(set(after)) == len(after)
    assert isinstance(outcome, Refused) != possible, getattr(outcome, "message", names)
    if possible:
        back = outcome.rename({new: old for old, new in names.items()})
        plain.assert_same(back)


VALUES = st.one_of(st.integers(0, 12).map(torch.arange), NESTED, JUNK)


@BOUNDED
@given(plain_samples(), KEYS, VALUES, st.sampled_from(["input_ids", "score", "row", "nothing", None]))
def test_adding_a_key(plain, key, value, like):
    sample = plain.packed()
    outcome = attempt(lambda: sample.with_data({key: value}, like=like), "key", "with_data")
    if isinstance(outcome, Refused):
        fitting = isinstance(value, torch.Tensor) and value.ndim and like in ("input_ids", "score")
        rows = sum(len(s) for group in plain.data.get(like, []) for s in group)
        assert not (fitting and isinstance(key, str) and len(value) == rows), outcome.message
    else:
        assert len(outcome[key]) == outcome.lengths[key].total
        assert outcome.lengths[key] == sample.lengths[like]

"""Compare `Lengths` with nested lists of integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realign.api import Lengths
from realign.api.lengths import pack, pick

NESTED = st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=6)


@settings(deadline=None)
@given(NESTED)
def test_boundaries_are_those_of_the_nested_lists(nested: list[list[int]]) -> None:
    lengths = Lengths.of(nested)
    flat = [n for group in nested for n in group]
    assert lengths.as_tuples() == tuple(map(tuple, nested))
    assert lengths.total == sum(flat)
    assert lengths.starts.tolist() == [sum(flat[:i]) for i in range(len(flat) + 1)]
    assert lengths.sequence_starts.tolist() == [sum(map(len, nested[:i])) for i in range(len(nested) + 1)]
    assert lengths.per_prompt.tolist() == list(map(sum, nested))
    assert lengths.prompt_of_sequence.tolist() == [p for p, group in enumerate(nested) for _ in group]
    assert lengths.ones().as_tuples() == tuple((1,) * len(group) for group in nested)


@settings(deadline=None)
@given(NESTED, NESTED)
def test_join_concatenates_and_equality_is_of_content(a: list[list[int]], b: list[list[int]]) -> None:
    joined = Lengths.join([Lengths.of(a), Lengths.of(b)])
    assert joined == Lengths.of(a + b)
    assert (Lengths.of(a) == Lengths.of(b)) == (a == b)
    assert Lengths.of(a).same_sequences(Lengths.of(b)) == ([*map(len, a)] == [*map(len, b)])
    assert Lengths.of(a) != a


@settings(deadline=None)
@given(NESTED, st.data())
def test_chosen_rows_are_those_of_the_chosen_sequences(nested: list[list[int]], data: st.DataObject) -> None:
    lengths = Lengths.of(nested)
    n = len(lengths.flat)
    chosen = np.array(data.draw(st.lists(st.integers(0, n - 1), unique=True) if n else st.just([])), dtype=np.int64)
    rows = lengths.rows(chosen)
    every = np.arange(lengths.total)
    chosen_rows = rows.tolist() if isinstance(rows, torch.Tensor) else [int(r) for run in rows for r in every[run]]
    starts = lengths.starts.tolist()
    assert chosen_rows == [row for s in chosen for row in range(starts[s], starts[s + 1])]


@settings(deadline=None)
@given(NESTED, st.data())
def test_prompts_are_chosen_with_their_sequences(nested: list[list[int]], data: st.DataObject) -> None:
    lengths = Lengths.of(nested)
    order = data.draw(st.permutations(range(len(nested))))
    chosen = np.array(order[: data.draw(st.integers(0, len(nested)))], dtype=np.int64)
    sequences, counts = lengths.sequences_of(chosen)
    assert lengths.take(sequences, counts) == Lengths.of([nested[p] for p in chosen])
    start = data.draw(st.integers(0, len(nested)))
    stop = data.draw(st.integers(start, len(nested)))
    assert lengths.between(start, stop) == Lengths.of(nested[start:stop])


@pytest.mark.parametrize(
    ("nested", "message"),
    [
        ([[1, -2]], r"Lengths.flat must not be negative, found -2 at 1"),
        ([[1.5]], r"Lengths.flat must be a list of integers, found float64 of shape \[1\]"),
        ([[True, False]], r"Lengths.flat must be a list of integers, found bool"),
        ([["3"]], r"Lengths.flat must be a list of integers, found <U1"),
    ],
)
def test_a_length_is_a_natural_number(nested: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lengths.of(nested)


@settings(deadline=None)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=8), st.data())
def test_picked_rows_are_those_of_the_sequences_however_long(sizes: list[int], data: st.DataObject) -> None:
    """Cover both ways of copying: runs of adjacent sequences, and single rows where the runs are short."""
    lengths = Lengths.of([sizes])
    x = torch.arange(lengths.total)
    chosen = data.draw(st.permutations(range(len(sizes))))
    parts = torch.split(x, sizes)
    assert torch.equal(pick(x, lengths.rows(np.array(chosen))), torch.cat([parts[s] for s in chosen]))


@pytest.mark.parametrize(
    ("nested", "message"),
    [
        ([[[1]], "ab"], "id 'b': found str, expected a list of sequences"),
        ([torch.zeros(2), []], "id 'a': found Tensor, expected a list of sequences"),
        ([[[1]], [torch.tensor(3)]], "id 'b': found Tensor, expected tensors or lists of numbers"),
        ([[[1]], [[[1, 2], [3]]]], "id 'b': found list, expected tensors or lists of numbers"),
        ([[[1]], [None]], "id 'b': found NoneType, expected tensors or lists of numbers"),
    ],
)
def test_what_is_not_nested_is_refused_by_id(nested: list[object], message: str) -> None:
    with pytest.raises(ValueError, match=f"key 'x', {message}"):
        pack("x", ["a", "b"], nested)  # type: ignore[arg-type]

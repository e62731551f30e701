"""Test how packed tensors are assembled from parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realign.api import Lengths
from realign.api.packing import concatenate, describe, pack, pick, some


@settings(deadline=None)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=8), st.data())
def test_picked_rows_are_those_of_the_sequences_however_long(sizes: list[int], data: st.DataObject) -> None:
    """Cover both ways of copying: runs of adjacent sequences, and single rows where the runs are short."""
    lengths = Lengths.of([sizes])
    x = torch.arange(lengths.total)
    chosen = data.draw(st.permutations(range(len(sizes))))
    parts = torch.split(x, sizes)
    assert torch.equal(pick(x, lengths.rows(np.array(chosen))), torch.cat([parts[s] for s in chosen]))


def test_adjacent_sequences_are_a_view() -> None:
    x = torch.arange(6)
    found = pick(x, Lengths.of([[1, 2, 3]]).rows(np.array([1, 2])))
    assert found.tolist() == [1, 2, 3, 4, 5]
    assert found.data_ptr() == x[1:].data_ptr()


def test_lists_are_promoted_to_one_dtype_and_tensors_are_not() -> None:
    x, lengths = pack("x", ["a", "b"], [[[1, 2], []], [[0.5]]])
    assert x.tolist() == [1.0, 2.0, 0.5]
    assert lengths.nested() == ((2, 0), (1,))
    with pytest.raises(ValueError, match="key 'x' is float64 for 'b', but int64 for 'a'"):
        pack("x", ["a", "b"], [[[1, 2]], [[torch.zeros(1, dtype=torch.float64)][0]]])


def test_parts_without_rows_adapt() -> None:
    owners = [("a",), ("b",), ("c",)]
    parts = [torch.zeros(0), torch.ones(2, 3, dtype=torch.int64), torch.zeros(0, 5)]
    assert torch.equal(concatenate("x", parts, owners), parts[1])
    assert concatenate("x", parts[2:], owners[2:]).shape == (0, 5)
    assert concatenate("x", [], []).shape == (0,)


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


def test_descriptions_are_short() -> None:
    assert describe(torch.zeros(6, 2, dtype=torch.bfloat16), Lengths.of([[2, 4]])) == (
        "[6, 2]       bfloat16 2 sequences of 2 to 4, mean 3.0"
    )
    assert some(["a", 1]) == "'a', 1"
    assert some(range(1000)) == "0, 1, 2, ... (1000 in all)"

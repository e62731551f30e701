from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realign.functional.packed import (
    broadcast_to_tokens,
    check_shapes,
    cu_seqlens_of,
    first_of_each,
    last_true,
    position_ids,
    previous,
    segment_sum,
)

LENGTHS = st.lists(st.integers(0, 6), max_size=8)


def test_trap_a4_index_table_of_a_five_token_sequence():
    """Pack prompt p0 p1 and response r2 r3 r4 after another sequence: all values of token t are at index t."""
    cu_seqlens = cu_seqlens_of([1, 5])
    hidden_T = torch.tensor([9.0, 0.0, 1.0, 2.0, 3.0, 4.0])  # output of the model at each slot
    loss_mask_T = torch.tensor([False, False, False, True, True, True])
    assert previous(hidden_T, cu_seqlens, -1.0).tolist() == [-1.0, -1.0, 0.0, 1.0, 2.0, 3.0]
    assert last_true(loss_mask_T, cu_seqlens).tolist() == [-1, 5]
    assert position_ids(cu_seqlens)[loss_mask_T].tolist() == [2, 3, 4]


def test_trap_a1_previous_never_crosses_a_boundary():
    cu_seqlens = cu_seqlens_of([3, 2])
    a_T = torch.tensor([1, 2, 3, 4, 5])
    b_T = torch.tensor([1, 2, 99, 4, 5])
    assert previous(a_T, cu_seqlens, 0).tolist() == [0, 1, 2, 0, 4]
    assert previous(b_T, cu_seqlens, 0)[3:].tolist() == previous(a_T, cu_seqlens, 0)[3:].tolist()


@settings(deadline=None)  # the machine may be busy
@given(LENGTHS, st.randoms(use_true_random=False))
def test_segments_equal_a_loop(lengths, random):
    cu_seqlens = cu_seqlens_of(lengths)
    rows = [[random.uniform(-1, 1) for _ in range(n)] for n in lengths]
    masks = [[random.random() < 0.5 for _ in range(n)] for n in lengths]
    x_T = torch.tensor([v for row in rows for v in row], dtype=torch.float64)
    mask_T = torch.tensor([v for row in masks for v in row], dtype=torch.bool)
    assert segment_sum(x_T, cu_seqlens).tolist() == pytest.approx([sum(row) for row in rows])
    starts = cu_seqlens.tolist()
    expected = [
        max((start + i for i, v in enumerate(row) if v), default=-1)
        for start, row in zip(starts[:-1], masks, strict=True)
    ]
    assert last_true(mask_T, cu_seqlens).tolist() == expected
    assert previous(x_T, cu_seqlens, 7.0).tolist() == [v for row in rows for v in ([7.0, *row][: len(row)])]
    ids_S = torch.arange(len(lengths))
    assert broadcast_to_tokens(ids_S, cu_seqlens).tolist() == [s for s, n in enumerate(lengths) for _ in range(n)]


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"negative.*-2"):
        cu_seqlens_of([1, -2])
    with pytest.raises(ValueError, match=r"\(3,\).*ends at 4"):
        segment_sum(torch.zeros(3), cu_seqlens_of([4]))
    with pytest.raises(ValueError, match=r"x_S has shape \(3,\), should be \(2,\)"):
        broadcast_to_tokens(torch.zeros(3), cu_seqlens_of([1, 1]))
    with pytest.raises(ValueError, match=r"mask_T has dtype torch.float32"):
        check_shapes(torch.zeros(2), mask_T=torch.zeros(2))
    with pytest.raises(ValueError, match=r"one dimension"):
        check_shapes(torch.zeros(2, 1))


def test_seed_a4_positions_of_the_text():
    """A padded row counts positions by an exclusive sum of its mask; packed, the tokens that it has get the same."""
    mask = torch.tensor([1, 0, 0, 1, 1, 1])
    exclusive = mask.cumsum(0) - mask
    assert exclusive.tolist() == [0, 1, 1, 1, 2, 3]
    assert position_ids(cu_seqlens_of([4])).tolist() == exclusive[mask.bool()].tolist() == [0, 1, 2, 3]


def test_the_first_element_of_a_unit_in_the_mask_stands_for_it():
    unit_N = torch.tensor([0, 0, 2, 2, 2, 1])
    mask_N = torch.tensor([True, True, False, True, True, False])
    assert first_of_each(unit_N, mask_N).tolist() == [True, False, False, True, False, False]
    assert first_of_each(unit_N[:0], mask_N[:0]).tolist() == []

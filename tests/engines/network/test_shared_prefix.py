from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realign.api import Lengths, MicroBatchSpec
from realign.engines.network.shared_prefix import MIN_SAVED, Layout, Passes, common_prefixes, worthwhile
from tests.tiny import random_sample

GROUPS = st.lists(
    st.tuples(st.integers(0, 4), st.lists(st.integers(0, 5), max_size=4)), max_size=5
)  # tokens that are shared, and those after them


def test_a_layout_by_hand():
    layout = Layout.of(Lengths.of([[5, 4], [3]]), np.array([2, 0]))
    assert layout.pieces.tolist() == [2, 3, 2, 3]
    assert layout.after.tolist() == [-1, 0, 0, -1]
    assert layout.token_R.tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 10, 11]
    assert layout.row_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 5, 6, 7, 8, 9]
    assert layout.saved == 2
    assert layout.position_R.tolist() == [0, 1, 2, 3, 4, 2, 3, 0, 1, 2]
    assert layout.cu_seqlens.tolist() == [0, 2, 5, 7, 10]


@given(GROUPS)
@settings(deadline=None)  # the machine may be busy
def test_a_layout_token_by_token(groups):
    lengths = Lengths.of([[prefix + n for n in own] for prefix, own in groups])
    layout = Layout.of(lengths, np.array([prefix for prefix, _ in groups], dtype=np.int64))
    rows, row_of, token = [], [], 0
    for prefix, own in groups:
        shared = {}
        for n in own:
            for place in range(prefix + n):
                key = place if place < prefix and len(own) > 1 else None
                if key not in shared or key is None:
                    shared[key] = len(rows)
                    rows.append((token, place))
                row_of.append(shared[key])
                token += 1
    if layout.token_R is None:
        assert row_of == list(range(token))
        assert layout.pieces.tolist() == lengths.flat.tolist()
        assert layout.saved == 0
        return
    assert layout.token_R.tolist() == [t for t, _ in rows]
    assert layout.row_T.tolist() == row_of
    assert layout.saved == token - len(rows)
    assert layout.position_R.tolist() == [place for _, place in rows]


@given(st.lists(st.lists(st.lists(st.integers(0, 1), max_size=4), max_size=4), max_size=4))
@settings(deadline=None)
def test_common_prefixes(groups):
    flat = np.array([x for group in groups for sequence in group for x in sequence], dtype=np.int64)
    found = common_prefixes(flat, Lengths.of([[len(sequence) for sequence in group] for group in groups]))
    for n, group in zip(found.tolist(), groups, strict=True):
        columns = list(zip(*group, strict=False))
        same = [len(set(column)) == 1 for column in columns]
        assert n == (0 if len(group) < 2 else same.index(False) if False in same else len(same))


def test_prompts_are_shared_where_it_saves_enough():
    lengths = Lengths.of([[20, 20], [20, 20], [20] * 5, [7], []])
    at_least = int(MIN_SAVED * 40)
    prefix_P = np.array([at_least, at_least - 1, 3, 0, 0])
    assert worthwhile(prefix_P, lengths).tolist() == [at_least, 0, 3, 0, 0]


def test_different_sequences_are_left_alone():
    passes = Passes.of(random_sample([[9, 9], [5]]), MicroBatchSpec(n_microbatches=2), share=True)
    assert all(layout.token_R is None for _, layout in passes)
    assert passes.saved == 0


@pytest.mark.parametrize(("limit", "saved"), [(None, 18), (25, 18), (24, 12), (20, 12), (14, 6), (12, 0)])
def test_rows_of_a_cut_group(limit, saved):
    ids = torch.randint(3, 90, (30,), generator=torch.Generator().manual_seed(0))
    data = random_sample([[12, 9, 10, 12]])
    tokens = [torch.cat([ids[:6], torch.full((1,), i), ids[10 : 3 + n]]) for i, n in enumerate((12, 9, 10, 12))]
    data = data.with_tokens(input_ids=[tokens])
    passes = Passes.of(data, MicroBatchSpec(limit), share=True)
    rows = [int(layout.pieces.sum()) for _, layout in passes]
    assert limit is None or max(rows) <= limit
    assert sum(rows) == 43 - passes.saved
    assert passes.saved == saved

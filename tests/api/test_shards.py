"""Test how a batch is divided over ranks: properties of each division, and requirements on results."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realign.api import SequenceSample
from realign.api.shards import shard

NESTED = st.lists(st.lists(st.integers(0, 30), max_size=4), max_size=12)


def batch(nested: list[list[int]]) -> SequenceSample:
    """Return prompts p0, p1, ... with distinct tokens, one number per sequence and one per prompt."""
    n_tokens = sum(map(sum, nested))
    tokens = iter(torch.arange(n_tokens).split([n for group in nested for n in group] or [0]))
    data = {"input_ids": [[next(tokens) for _ in group] for group in nested]}
    ids = [f"p{i}" for i in range(len(nested))]
    whole = SequenceSample.from_sequences(ids, data, {"row": [{"at": i} for i in range(len(nested))]})
    return whole.with_sequences(score=torch.arange(float(whole.n_sequences)))


def same(a: SequenceSample, b: SequenceSample) -> bool:
    return (
        a.ids == b.ids
        and a.data.keys() == b.data.keys()
        and all(a.lengths[k] == b.lengths[k] and torch.equal(a[k], b[k]) for k in a.data)
        and a.metadata == b.metadata
    )


@settings(deadline=None)
@given(NESTED, st.integers(1, 6))
def test_every_prompt_stands_whole_in_one_part_and_comes_back(nested: list[list[int]], n: int) -> None:
    whole = batch(nested)
    parts = shard(whole, n, "input_ids")
    assert len(parts) == n
    assert sorted(i for part in parts for i in part.ids) == sorted(whole.ids)
    assert all(same(part, whole.take([whole.ids.index(i) for i in part.ids])) for part in parts)
    assert same(parts.restore(list(parts)), whole)


@settings(deadline=None)
@given(NESTED, st.integers(1, 6))
def test_loads_differ_by_one_prompt_at_most(nested: list[list[int]], n: int) -> None:
    parts = shard(batch(nested), n, "input_ids")
    loads = [part.lengths["input_ids"].total for part in parts]
    assert max(loads) - min(loads) <= max(map(sum, nested), default=0)


def test_longest_prompts_go_first_to_the_lightest_rank() -> None:
    # 9 -> rank 0; 8 -> rank 1; 7 -> rank 1 (8 < 9); 3 -> rank 0; 2 -> rank 0 (12 < 15)
    parts = shard(batch([[2], [3], [3, 4], [9], [8]]), 2, "input_ids")
    assert [part.ids for part in parts] == [("p0", "p1", "p3"), ("p2", "p4")]


def test_ranks_without_prompts_need_no_keys_to_come_back() -> None:
    parts = shard(batch([[4], [2]]), 3, "input_ids")
    assert [len(part) for part in parts] == [1, 1, 0]
    results = [part.select(["score"]) for part in parts[:2]]
    back = parts.restore([*results, SequenceSample(())])
    assert back["score"].tolist() == [0, 1]
    assert parts[2]["input_ids"].dtype == torch.int64


def test_prompts_without_sequences_come_back_without_any() -> None:
    parts = shard(batch([[4, 1], [], []]), 2, "input_ids")
    assert [part.ids for part in parts] == [("p0",), ("p1", "p2")]
    back = parts.restore([parts[0].select(["score"]), SequenceSample(("p1", "p2"))])
    assert back.lengths["score"].nested() == ((1, 1), (), ())
    with pytest.raises(ValueError, match="key 'score' is missing for ids 'p0'"):
        parts.restore([SequenceSample(("p0",)), parts[1].select(["score"])])


def test_results_may_be_cut_in_another_way() -> None:
    parts = shard(batch([[4], [2], [1]]), 2, "input_ids")
    results = [
        SequenceSample.from_sequences(part.ids, {"new": [[[int(i[1:])] * 2] * 3 for i in part.ids]}) for part in parts
    ]
    back = parts.restore(results)
    assert back.lengths["new"].nested() == ((2, 2, 2),) * 3
    assert back["new"].tolist() == [0] * 6 + [1] * 6 + [2] * 6


def test_results_that_do_not_fit_are_refused() -> None:
    parts = shard(batch([[4], [2]]), 2, "input_ids")
    with pytest.raises(ValueError, match="restore got 1 results for 2 ranks"):
        parts.restore([parts[0]])
    with pytest.raises(ValueError, match=r"ids 'p1' for rank 0, whose part has 'p0'"):
        parts.restore([parts[1], parts[0]])


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="n=0: a batch needs at least 1 rank"):
        shard(batch([[1]]), 0, "input_ids")
    with pytest.raises(ValueError, match=r"no packed key 'prompt_ids' to shard by \(keys: input_ids, score\)"):
        shard(batch([[1]]), 2, "prompt_ids")

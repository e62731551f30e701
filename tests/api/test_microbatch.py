"""Test the micro-batch plan: properties of all plans, and regression tests of known errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from realign.api import Lengths, MicroBatchSpec, SequenceSample, plan_microbatches
from realign.errors import SettingsError

NESTED = st.lists(st.lists(st.integers(0, 30), max_size=5), max_size=12)
LIMIT = st.one_of(st.none(), st.integers(30, 120))


def loads_of(plan: list[np.ndarray], nested: list[list[int]]) -> list[int]:
    flat = [n for group in nested for n in group]
    return [sum(flat[s] for s in part) for part in plan]


def owners_of(nested: list[list[int]]) -> list[int]:
    return [p for p, group in enumerate(nested) for _ in group]


def units_of(nested: list[list[int]], limit: int | None) -> list[int]:
    """Return the loads of the indivisible pieces."""
    units: list[int] = []
    for group in nested:
        whole = limit is None or sum(group) <= limit
        units += ([sum(group)] if group else []) if whole else group
    return units


@settings(deadline=None)
@given(NESTED, LIMIT, st.integers(1, 8))
def test_every_sequence_stands_in_exactly_one_microbatch_within_the_budget(
    nested: list[list[int]], limit: int | None, n: int
) -> None:
    plan = plan_microbatches(Lengths.of(nested), MicroBatchSpec(limit, n))
    assert sorted(s for part in plan for s in part) == list(range(sum(map(len, nested))))
    assert all(len(part) and (np.diff(part) > 0).all() for part in plan)
    assert [part[0] for part in plan] == sorted(part[0] for part in plan)
    if limit is not None:
        assert max(loads_of(plan, nested), default=0) <= limit


@settings(deadline=None)
@given(NESTED, LIMIT, st.integers(1, 8))
def test_a_group_is_cut_only_if_it_alone_exceeds_the_budget(nested: list[list[int]], limit: int | None, n: int) -> None:
    plan = plan_microbatches(Lengths.of(nested), MicroBatchSpec(limit, n))
    owners = owners_of(nested)
    for prompt, group in enumerate(nested):
        parts = sum(any(owners[s] == prompt for s in part) for part in plan)
        if limit is None or sum(group) <= limit:
            assert parts == bool(group)


@settings(deadline=None)
@given(NESTED, LIMIT, st.integers(1, 8))
def test_the_number_is_at_least_what_is_asked_and_bounded(nested: list[list[int]], limit: int | None, n: int) -> None:
    plan = plan_microbatches(Lengths.of(nested), MicroBatchSpec(limit, n))
    units = units_of(nested, limit)
    asked = min(n, len(units))
    if limit is None:
        assert len(plan) == asked
    else:
        needed = max(asked, math.ceil(sum(units) / limit))
        over_half = sum(2 * unit > limit for unit in units)
        assert needed <= len(plan) <= max(needed, math.ceil(2 * sum(units) / limit), over_half)


@pytest.mark.parametrize(
    ("ids", "owner"), [(None, "prompt 1 of the batch"), (("a", "b"), "id 'b'")], ids=["position", "id"]
)
def test_trap_d10_a_sequence_over_the_cap_is_named(ids: tuple[str, ...] | None, owner: str) -> None:
    with pytest.raises(SettingsError, match=f"max_tokens_per_microbatch=8: sequence 2 of {owner} has 9 tokens"):
        plan_microbatches(Lengths.of([[3], [1, 2, 9]]), MicroBatchSpec(8), ids)


@settings(deadline=None)
@given(NESTED, LIMIT, st.integers(1, 8))
def test_whole_groups_are_never_cut(nested: list[list[int]], limit: int | None, n: int) -> None:
    spec = MicroBatchSpec(limit, n, whole_groups=True)
    if limit is not None and max(map(sum, nested), default=0) > limit:
        with pytest.raises(SettingsError, match="the loss needs them in one micro-batch"):
            plan_microbatches(Lengths.of(nested), spec)
        return
    plan, owners = plan_microbatches(Lengths.of(nested), spec), owners_of(nested)
    for prompt, group in enumerate(nested):
        assert sum(any(owners[s] == prompt for s in part) for part in plan) == bool(group)
    assert [p.tolist() for p in plan] == [
        p.tolist() for p in plan_microbatches(Lengths.of(nested), MicroBatchSpec(limit, n))
    ]


@pytest.mark.parametrize(
    ("ids", "owner"), [(None, "prompt 1 of the batch"), (("a", "b"), "id 'b'")], ids=["position", "id"]
)
def test_a_whole_group_over_the_cap_is_named(ids: tuple[str, ...] | None, owner: str) -> None:
    message = f"max_tokens_per_microbatch=8: the 3 sequences of {owner} have 9 tokens"
    with pytest.raises(SettingsError, match=message):
        plan_microbatches(Lengths.of([[8], [3, 3, 3]]), MicroBatchSpec(8, whole_groups=True), ids)
    assert len(plan_microbatches(Lengths.of([[8], [3, 3, 3]]), MicroBatchSpec(9, whole_groups=True), ids)) == 2


SHARED = st.lists(st.tuples(st.integers(0, 10), st.lists(st.integers(0, 20), max_size=5)), max_size=12)


@settings(deadline=None)
@given(SHARED, LIMIT, st.integers(1, 8))
def test_what_a_group_shares_counts_once(groups: list[tuple[int, list[int]]], limit: int | None, n: int) -> None:
    nested = [[prefix + own for own in group] for prefix, group in groups]
    prefixes = np.array([prefix for prefix, _ in groups], dtype=np.int64)
    plan = plan_microbatches(Lengths.of(nested), MicroBatchSpec(limit, n), prefixes=prefixes)
    assert sorted(s for part in plan for s in part) == list(range(sum(map(len, nested))))
    owners, own = owners_of(nested), [n for _, group in groups for n in group]
    for part in plan:
        rows = sum(own[s] for s in part) + sum(groups[p][0] for p in {owners[s] for s in part})
        assert limit is None or rows <= limit
    for prompt, (prefix, group) in enumerate(groups):
        parts = [part for part in plan if any(owners[s] == prompt for s in part)]
        if group and (limit is None or prefix + sum(group) <= limit):
            assert len(parts) == 1


def test_a_group_over_the_cap_is_cut_into_runs() -> None:
    lengths = Lengths.of([[16, 13, 14, 16]])  # all sequences share the first 10 tokens
    plans = {
        limit: plan_microbatches(lengths, MicroBatchSpec(limit), prefixes=np.array([10])) for limit in (29, 23, 16)
    }
    assert {limit: [p.tolist() for p in plan] for limit, plan in plans.items()} == {
        29: [[0, 1, 2, 3]],
        23: [[0, 1, 2], [3]],
        16: [[0], [1], [2], [3]],
    }
    with pytest.raises(SettingsError, match=r"max_tokens_per_microbatch=28: .* have 29 tokens"):
        plan_microbatches(lengths, MicroBatchSpec(28, whole_groups=True), prefixes=np.array([10]))


def test_split_names_the_id_of_a_sequence_over_the_cap() -> None:
    sample = SequenceSample.from_sequences(["a", "b"], {"input_ids": [[[1]], [[1, 2, 3]]]})
    with pytest.raises(SettingsError, match="sequence 0 of id 'b' has 3 tokens"):
        sample.split(MicroBatchSpec(2))


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=3), min_size=1, max_size=8), NESTED)
def test_trap_d9_ranks_that_agree_on_the_largest_number_get_it(short: list[list[int]], long: list[list[int]]) -> None:
    """Each rank plans, and all use the largest number of micro-batches as the minimum. A rank with enough groups
    reaches it."""
    limit = 90
    plans = [plan_microbatches(Lengths.of(nested), MicroBatchSpec(limit)) for nested in (short, long)]
    agreed = max(map(len, plans))
    for nested in (short, long):
        n_units = len(units_of(nested, limit))
        again = plan_microbatches(Lengths.of(nested), MicroBatchSpec(limit, agreed))
        assert len(again) >= min(agreed, n_units)
        assume(n_units >= agreed)
        assert len(again) == agreed


@pytest.mark.parametrize("limit", [None, 4])
def test_trap_a14_empty_sequences_stand_in_the_plan(limit: int | None) -> None:
    plan = plan_microbatches(Lengths.of([[0], [0, 0], [], [1]]), MicroBatchSpec(limit, n_microbatches=3))
    assert [p.tolist() for p in plan] == [[0], [1, 2], [3]]
    assert plan_microbatches(Lengths.of([[], []]), MicroBatchSpec(limit)) == []
    assert plan_microbatches(Lengths.of([]), MicroBatchSpec(limit, n_microbatches=2)) == []


def batch() -> SequenceSample:
    return SequenceSample.from_sequences(
        ["a", "b", "c"], {"input_ids": [[[1, 2], [3]], [[4, 5, 6]], [[7], [8, 9]]], "prompt_ids": [[[0]]] * 3}
    )


def test_restore_takes_one_part_for_each_microbatch_in_order() -> None:
    batches = batch().split(MicroBatchSpec(3))
    assert len(batches) == 3
    assert batches[0].ids == ("a",)
    assert [mb.ids for mb in batches[1:]] == [("b",), ("c",)]
    results = [
        SequenceSample(mb.ids).with_data({"x": mb["input_ids"]}, lengths=mb.lengths["input_ids"]) for mb in batches
    ]
    assert batches.restore(results)["x"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    with pytest.raises(ValueError, match="restore got 2 parts for 3 micro-batches"):
        batches.restore(results[:2])
    with pytest.raises(ValueError, match="got ids 'c' for the micro-batch with ids 'a'"):
        batches.restore([results[2], results[1], results[0]])

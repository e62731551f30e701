from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realign.data import batch_indices, epoch_order

# Test jobs may run in parallel on one machine, so a slow example is not a failure.
unhurried = settings(deadline=None)
sizes = st.integers(1, 20)
seeds = st.integers(0, 2**63 - 1)


def stream(n, batch, steps, seed, shuffle=True):
    return [pair for step in range(steps) for pair in batch_indices(n, batch, step, seed, shuffle)]


@unhurried
@given(sizes, seeds, st.integers(0, 5))
def test_an_epoch_is_a_permutation_and_a_pure_function(n, seed, epoch):
    order = epoch_order(n, seed, epoch)
    assert sorted(order.tolist()) == list(range(n))
    assert order.dtype == np.int64
    np.random.seed(seed % 1000)
    assert np.array_equal(epoch_order(n, seed, epoch), order)


def test_orders_differ_between_epochs_and_seeds():
    orders = {tuple(epoch_order(50, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_the_order_is_the_same_on_every_machine():
    assert epoch_order(8, 0, 0).tolist() == [7, 2, 6, 4, 1, 5, 3, 0]
    assert epoch_order(8, 0, 1).tolist() == [0, 7, 2, 1, 6, 4, 5, 3]


@unhurried
@given(sizes, sizes, seeds, st.booleans())
def test_trap_d11_every_row_once_per_epoch_and_none_dropped(n, batch, seed, shuffle):
    """This also holds for a dataset smaller than a batch, and for batch sizes that do not divide it."""
    steps = 3 * n  # batch * steps positions are exactly `3 * batch` epochs
    seen = Counter(stream(n, batch, steps, seed, shuffle))
    assert seen == Counter({(epoch, row): 1 for epoch in range(3 * batch) for row in range(n)})


@unhurried
@given(sizes, sizes, st.integers(0, 30), seeds, st.booleans())
def test_trap_d11_a_batch_is_full_and_its_places_are_distinct(n, batch, step, seed, shuffle):
    pairs = batch_indices(n, batch, step, seed, shuffle)
    assert len(pairs) == batch
    assert len(set(pairs)) == batch
    assert [epoch for epoch, _ in pairs] == [(step * batch + i) // n for i in range(batch)]


@unhurried
@given(st.integers(1, 12), st.integers(1, 12), seeds)
def test_the_stream_does_not_depend_on_the_batch_size(n, batch, seed):
    assert stream(n, batch, n, seed) == stream(n, 1, n * batch, seed)


@unhurried
@given(st.integers(1, 12), st.integers(1, 12), seeds)
def test_trap_g1_a_step_after_an_epoch_boundary_needs_no_replay(n, batch, seed):
    """The end of the first `batch` epochs is exactly between steps n - 1 and n."""
    whole = stream(n, batch, 2 * n, seed)
    resumed = [pair for step in range(n, 2 * n) for pair in batch_indices(n, batch, step, seed, True)]
    assert resumed == whole[n * batch :]
    assert resumed[0][0] == batch


def test_without_shuffling_rows_come_in_their_order():
    assert batch_indices(3, 4, 0, seed=5, shuffle=False) == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert batch_indices(3, 4, 1, seed=5, shuffle=False) == [(1, 1), (1, 2), (2, 0), (2, 1)]


@pytest.mark.parametrize("bad", [{"n": 0}, {"batch_prompts": 0}, {"step": -1}])
def test_bad_sizes_are_named(bad):
    arguments = {"n": 3, "batch_prompts": 2, "step": 0, "seed": 0, "shuffle": True} | bad
    with pytest.raises(ValueError, match=rf"{next(iter(bad))}=.*: must be at least"):
        batch_indices(**arguments)

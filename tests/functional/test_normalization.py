from __future__ import annotations

import itertools
import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realign.functional.aggregation import AggregationMode, aggregate
from realign.functional.losses import policy_loss
from realign.functional.normalization import Scope, degenerate_groups, normalize, whiten
from realign.functional.packed import cu_seqlens_of


def flags(
    mean=Scope.batch, std=Scope.batch, *, leave_one_out=False, unbiased=False, eps=1e-8, eps_inside_sqrt=False
) -> dict:
    """Return all keyword arguments of `normalize` except `reduce`."""
    return dict(locals())


GROUP = flags(Scope.group, Scope.group)
LOO = flags(Scope.group, Scope.group, leave_one_out=True)
MEAN_STD = list(itertools.product(Scope, Scope))


def of_group(values, spec=GROUP):
    x_N = torch.as_tensor(values)
    n = len(x_N)
    return normalize(x_N, torch.zeros(n, dtype=torch.int64), torch.ones(n, dtype=torch.bool), **spec)


def reference(x, group, mask, spec):
    """Compute `normalize` from its definition in numpy, one element at a time."""
    out = np.zeros(len(x))
    for i in np.flatnonzero(mask):
        units = {Scope.batch: mask, Scope.group: mask & (group == group[i])}
        y = x[i]
        if spec["mean"] is not Scope.none:
            unit = units[spec["mean"]].copy()
            if spec["leave_one_out"]:
                unit[i] = False
            y = x[i] - x[unit].mean() if unit.any() else 0.0
        if spec["std"] is not Scope.none:
            values = x[units[spec["std"]]]
            if len(values) < 2 or np.ptp(values) == 0:
                y = 0.0
            else:
                var = values.var(ddof=int(spec["unbiased"]))
                y /= np.sqrt(var + spec["eps"]) if spec["eps_inside_sqrt"] else np.sqrt(var) + spec["eps"]
        out[i] = y
    return out


@pytest.mark.parametrize("scopes", MEAN_STD)
@pytest.mark.parametrize("loo", [False, True])
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_trap_e8_every_combination_of_flags_does_what_it_says(scopes, loo, unbiased, inside):
    mean, std = scopes
    spec = flags(mean, std, leave_one_out=loo, unbiased=unbiased, eps=1e-2, eps_inside_sqrt=inside)
    rng = np.random.default_rng(0)
    x, group, mask = rng.normal(size=23), rng.integers(0, 6, size=23) * 7 - 3, rng.random(23) < 0.8
    got = normalize(torch.tensor(x), torch.tensor(group), torch.tensor(mask), **spec)
    np.testing.assert_allclose(got.numpy(), reference(x, group, mask, spec), rtol=1e-12, atol=1e-14)


def test_trap_e8_group_and_batch_differ():
    x_N, group_N = torch.tensor([1.0, 0.0, 5.0, 5.5]), torch.tensor([0, 0, 1, 1])
    results = [normalize(x_N, group_N, torch.ones(4, dtype=torch.bool), mean=m, std=s) for m, s in MEAN_STD]
    for a, b in itertools.combinations(results, 2):
        assert not torch.allclose(a, b)


def test_trap_e8_biased_and_unbiased_deviation():
    x = [1.0, 0.0, 0.0, 0.0]
    assert of_group(x)[0].item() == pytest.approx(1.7321, abs=1e-4)
    assert of_group(x, flags(Scope.group, Scope.group, unbiased=True))[0].item() == pytest.approx(1.5, abs=1e-6)


def test_trap_e1_a_constant_group_gives_exactly_zero_and_is_flagged():
    x_N = torch.tensor([1.0, 1, 1, 1, 0, 1, 0.35, 0.35, 0.35])
    group_N = torch.tensor([5, 5, 5, 5, 2, 2, 9, 9, 9])
    mask_N = torch.ones(9, dtype=torch.bool)
    for mean, std in MEAN_STD:
        out_N = normalize(x_N, group_N, mask_N, mean=mean, std=std)
        assert out_N.isfinite().all()
        if Scope.group in (mean, std):
            assert not out_N[[0, 1, 2, 3, 6, 7, 8]].any()
    assert degenerate_groups(x_N, group_N, mask_N).tolist() == [False, True, True]  # ids 2, 5, 9


def test_trap_e2_leave_one_out_divides_by_the_deviation_of_the_whole_group():
    assert of_group([1.0, 0, 0, 0], LOO).tolist() == pytest.approx([2.3094, -0.7698, -0.7698, -0.7698], abs=1e-4)


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=16))
def test_trap_e2_leave_one_out_is_bounded(values):
    bound = len(values) / math.sqrt(len(values) - 1)
    assert of_group(torch.tensor(values, dtype=torch.float64), LOO).abs().max() <= bound * (1 + 1e-6)


@pytest.mark.parametrize("value", [0.95, 0.35, 0.4, 0.3, 1e6 + 0.1])
def test_trap_e3_rounding_is_never_blown_up(value):
    assert not of_group([value] * 8).any()
    almost = torch.full((8,), value)
    almost[0] = torch.nextafter(almost[0], torch.tensor(math.inf))
    for spec in (GROUP, LOO):
        assert not of_group(almost, spec).any()
        assert of_group([0.0] + [value] * 7, spec).abs().max() < 10


@pytest.mark.parametrize("scope", [Scope.group, Scope.batch])
@pytest.mark.parametrize("loo", [False, True])
@pytest.mark.parametrize("base", [1e6, -3e7, 1e12])
def test_a_mean_without_a_division_keeps_small_differences_of_large_numbers(scope, loo, base):
    found_N = of_group(torch.tensor([base, base + 1], dtype=torch.float64), flags(scope, Scope.none, leave_one_out=loo))
    assert found_N.tolist() == ([-1, 1] if loo else [-0.5, 0.5])


def test_a_group_that_hardly_varies_is_zeroed_only_where_its_own_deviation_divides():
    x_N, group_N = torch.tensor([1e6, 1e6 + 1, 0.0, 2e6], dtype=torch.float64), torch.tensor([0, 0, 1, 1])

    def found(std):
        return normalize(x_N, group_N, torch.ones(4, dtype=torch.bool), mean=Scope.group, std=std, eps=0.0).tolist()

    assert found(Scope.group) == [0, 0, -1, 1]
    std = float(x_N.std(correction=0))
    assert found(Scope.batch) == pytest.approx([-0.5 / std, 0.5 / std, -1e6 / std, 1e6 / std])


@settings(deadline=None)  # the machine may be busy
@given(st.floats(-1e30, 1e30), st.integers(1, 400), st.sampled_from(MEAN_STD), st.booleans())
def test_trap_e1_equal_elements_give_exactly_zero_without_a_division_too(value, n, scopes, loo):
    found_N = of_group(torch.full((n,), value, dtype=torch.float64), flags(*scopes, leave_one_out=loo))
    assert scopes == (Scope.none, Scope.none) or not found_N.any()


def test_trap_e4_groups_are_ragged_and_found_by_id():
    x_N, group_N = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 0, 1])
    out_N = normalize(x_N, group_N, torch.ones(3, dtype=torch.bool), **GROUP)
    assert out_N.tolist() == pytest.approx([-1, 1, 0], abs=1e-6)


@pytest.mark.parametrize("scope", [Scope.group, Scope.batch])
@pytest.mark.parametrize("std", [Scope.none, Scope.group, Scope.batch])
def test_trap_e5_a_single_element_gives_zero(scope, std):
    for loo in (False, True):
        assert of_group([3.0], flags(scope, std, leave_one_out=loo)).tolist() == [0]
    assert degenerate_groups(*torch.tensor([[3], [0]]), torch.tensor([True])).tolist() == [True]


@settings(deadline=None)  # the machine may be busy
@given(st.permutations(list(range(9))), st.sampled_from(MEAN_STD))
def test_trap_e6_order_is_invisible(order, scopes):
    x_N = torch.tensor([3.0, 1, 4, 1, 5, 9, 2, 6, 5], dtype=torch.float64)
    group_N = torch.tensor([4, 4, 4, 8, 8, 8, 8, 1, 1])
    mask_N = torch.tensor([1, 1, 1, 1, 0, 1, 1, 1, 1], dtype=torch.bool)
    spec = flags(*scopes)
    whole = normalize(x_N, group_N, mask_N, **spec)
    moved = normalize(x_N[order], group_N[order], mask_N[order], **spec)
    torch.testing.assert_close(moved, whole[order], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scopes", MEAN_STD)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -1e30])
def test_trap_e9_rejected_rows_touch_nobody(scopes, garbage):
    x_N, group_N = torch.tensor([1.0, 2, 0, 5, 7, 0]), torch.tensor([0, 0, 0, 1, 1, 1])
    mask_N = torch.tensor([True, True, False, True, True, False])
    dirty_N = x_N.masked_fill(~mask_N, garbage)
    spec = flags(*scopes)
    out_N = normalize(dirty_N, group_N, mask_N, **spec)
    assert torch.equal(out_N, normalize(x_N, group_N, mask_N, **spec))
    assert torch.equal(out_N[mask_N], normalize(x_N[mask_N], group_N[mask_N], mask_N[mask_N], **spec))
    assert not out_N[~mask_N].any()
    assert torch.equal(whiten(dirty_N, mask_N), whiten(x_N, mask_N))
    assert degenerate_groups(dirty_N, group_N, mask_N).tolist() == [False, False]


def test_trap_e11_where_eps_stands():
    x = [0.0, 2.0]  # standard deviation 1
    outside = flags(Scope.group, Scope.group, eps=1.0)
    inside = flags(Scope.group, Scope.group, eps=1.0, eps_inside_sqrt=True)
    assert of_group(x, outside).tolist() == pytest.approx([-0.5, 0.5])
    assert of_group(x, inside).tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])


def test_trap_e11_normalising_twice_changes_nothing_but_eps():
    once = of_group([1.0, 0, 0, 3.0])
    assert of_group(once).tolist() == pytest.approx(once.tolist(), abs=1e-6)


def test_trap_e12_randomised_rollouts_all_count():
    rng = np.random.default_rng(1)
    x, group = rng.normal(size=64), np.repeat(np.arange(8), 8)
    got = normalize(torch.tensor(x), torch.tensor(group), torch.ones(64, dtype=torch.bool), **GROUP).view(8, 8)
    rows = x.reshape(8, 8)
    expected = (rows - rows.mean(1, keepdims=True)) / rows.std(1, keepdims=True)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6)


def test_trap_e13_a_step_without_signal_has_exactly_no_gradient():
    advantages_S = of_group([0.35, 0.35, 0.35])
    logprobs_T = torch.randn(3, requires_grad=True)
    mask_T = torch.ones(3, dtype=torch.bool)
    loss_T = policy_loss(logprobs_T, torch.zeros(3), advantages_S, mask_T).loss_T
    aggregate(loss_T, mask_T, cu_seqlens_of([1, 1, 1]), AggregationMode.token_mean).backward()
    assert not logprobs_T.grad.any()


def test_trap_c13_dtypes():
    spec = flags(Scope.group, Scope.group, unbiased=True)
    bf16 = of_group(torch.tensor([1, 1, 1, 1.0078125], dtype=torch.bfloat16), spec)
    assert bf16.dtype == torch.float32
    assert bf16.tolist() == pytest.approx([-0.5, -0.5, -0.5, 1.5], abs=1e-5)
    assert of_group(torch.tensor([1, 0, 0, 0])).tolist() == of_group([1.0, 0, 0, 0]).tolist()
    assert not of_group(torch.full((4,), 60000.0, dtype=torch.float16)).any()


def over_ranks(parts, call):
    """Run `call(part, reduce)` in one thread per part. `reduce` sums over the threads."""
    barrier, slots, results = threading.Barrier(len(parts), timeout=20), [None] * len(parts), [None] * len(parts)

    def worker(rank):
        def reduce(x):
            slots[rank] = x
            barrier.wait()
            total = torch.stack(slots).sum(0)
            barrier.wait()
            return total

        results[rank] = call(parts[rank], reduce)

    threads = [threading.Thread(target=worker, args=(rank,)) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.cat(results)


@pytest.mark.parametrize("sizes", [[12], [5, 7], [1, 0, 11], [4, 4, 4]])
def test_trap_e10_statistics_of_the_batch_are_those_of_all_ranks(sizes):
    generator = torch.Generator().manual_seed(0)
    x_N = torch.randn(12, generator=generator, dtype=torch.float64)
    mask_N = torch.rand(12, generator=generator) < 0.7
    group_N = torch.arange(12)
    slices = [slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
    for loo in (False, True):
        spec = flags(leave_one_out=loo)
        got = over_ranks(
            slices, lambda s, reduce, spec=spec: normalize(x_N[s], group_N[s], mask_N[s], **spec, reduce=reduce)
        )
        torch.testing.assert_close(got, normalize(x_N, group_N, mask_N, **spec), rtol=1e-12, atol=1e-12)
    got = over_ranks(slices, lambda s, reduce: whiten(x_N[s], mask_N[s], reduce=reduce))
    torch.testing.assert_close(got, whiten(x_N, mask_N), rtol=1e-12, atol=1e-12)


def test_trap_e10_ranks_without_a_single_element_still_take_part():
    calls = []

    def reduce(x):
        calls.append(x.shape)
        return x

    empty = torch.zeros(0)
    assert normalize(empty, empty.long(), empty.bool(), reduce=reduce).shape == (0,)
    assert whiten(empty, empty.bool(), reduce=reduce).shape == (0,)
    assert calls == [(2, 1)] * 4


def test_whitening_of_the_source_a27_a28():
    x = np.array([1.0, 2.0, 4.0, 9.0])
    x_N = torch.tensor([1.0, 2.0, 4.0, 9.0, math.nan], dtype=torch.float64)
    mask_N = torch.tensor([True] * 4 + [False])
    expected = (x - x.mean()) / np.sqrt(x.var() + 1e-8)
    np.testing.assert_allclose(whiten(x_N, mask_N)[:4].numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(whiten(x_N, mask_N, shift_mean=False)[:4].numpy(), expected + x.mean(), rtol=1e-12)
    sample = (x - x.mean()) / np.sqrt(x.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(whiten(x_N, mask_N, unbiased=True)[:4].numpy(), sample, rtol=1e-12)


def test_whitening_of_fewer_than_two_elements_changes_nothing():
    x_N = torch.tensor([3.0, math.nan])
    assert whiten(x_N, torch.tensor([True, False])).tolist() == [3.0, 0.0]
    assert whiten(x_N, torch.tensor([False, False])).tolist() == [0.0, 0.0]
    assert not whiten(torch.full((3,), 0.1), torch.ones(3, dtype=torch.bool)).any()


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="group_N has shape"):
        normalize(torch.zeros(2), torch.zeros(3).long(), torch.ones(2, dtype=torch.bool), **GROUP)


def test_scopes_are_taken_by_name_too():
    x_N, group_N, mask_N = torch.randn(6), torch.tensor([0, 0, 0, 1, 1, 1]), torch.ones(6, dtype=torch.bool)
    for mean, std in MEAN_STD:
        found = normalize(x_N, group_N, mask_N, mean=mean.value, std=std.value)
        assert torch.equal(found, normalize(x_N, group_N, mask_N, mean=mean, std=std))
    with pytest.raises(ValueError, match="'row' is not a valid Scope"):
        normalize(x_N, group_N, mask_N, std="row")

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realign.functional.losses import policy_loss
from realign.functional.normalization import (
    MomentsKind,
    RunningMoments,
    Scope,
    degenerate_groups,
    normalize,
    score_moments,
    whiten,
)
from realign.functional.packed import cu_seqlens_of
from realign.interfaces.components import TokenMean
from tests.formulas import flags, over_ranks

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


def test_trap_e13_a_step_without_signal_has_exactly_no_gradient():
    advantages_S = of_group([0.35, 0.35, 0.35])
    logprobs_T = torch.randn(3, requires_grad=True)
    mask_T = torch.ones(3, dtype=torch.bool)
    loss_T = policy_loss(logprobs_T, torch.zeros(3), advantages_S, mask_T).loss_T
    TokenMean().total(loss_T, mask_T, cu_seqlens_of([1, 1, 1])).backward()
    assert not logprobs_T.grad.any()


def test_trap_c13_dtypes():
    spec = flags(Scope.group, Scope.group, unbiased=True)
    bf16 = of_group(torch.tensor([1, 1, 1, 1.0078125], dtype=torch.bfloat16), spec)
    assert bf16.dtype == torch.float32
    assert bf16.tolist() == pytest.approx([-0.5, -0.5, -0.5, 1.5], abs=1e-5)
    assert of_group(torch.tensor([1, 0, 0, 0])).tolist() == of_group([1.0, 0, 0, 0]).tolist()
    assert not of_group(torch.full((4,), 60000.0, dtype=torch.float16)).any()


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


CUMULATIVE, EXPONENTIAL = MomentsKind.cumulative, MomentsKind.exponential
KINDS = pytest.mark.parametrize("kind", MomentsKind)


def fed(batches, kind=CUMULATIVE, **options):
    moments = RunningMoments(kind, **options)
    for values in batches:
        x_N = torch.tensor(values, dtype=torch.float64)
        moments.update(x_N, torch.ones(len(x_N), dtype=torch.bool))
    return moments


def realhf(batches, beta):
    """Compute realhf's exponential moments: averages of values and squares, both divided by 1 - beta^updates."""
    mean = square = debias = 0.0
    for values in batches:
        mean = beta * mean + (1 - beta) * np.mean(values)
        square = beta * square + (1 - beta) * np.mean(np.square(values))
        debias = beta * debias + 1 - beta
    return mean / debias, math.sqrt(square / debias - (mean / debias) ** 2)


BATCHES = [[1.0, 2.0, 4.0], [10.0], [-3.0, 0.5], [2.0] * 5]


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.99999])
def test_exponential_moments_are_those_of_realhf(beta):
    for n in range(1, len(BATCHES) + 1):
        moments = fed(BATCHES[:n], EXPONENTIAL, beta=beta)
        assert (moments.mean, moments.std) == pytest.approx(realhf(BATCHES[:n], beta), rel=1e-7, abs=1e-12)


batches = st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6), min_size=1, max_size=6)


@settings(deadline=None)  # the machine may be busy
@given(batches, st.randoms(use_true_random=False))
def test_cumulative_moments_do_not_depend_on_how_or_in_which_order_values_came(values, random):
    flat = [x for part in values for x in part]
    whole = fed([flat])
    random.shuffle(flat)
    cut = random.randint(0, len(flat))
    for parts in (values, [flat[:cut], flat[cut:]], [[x] for x in flat]):
        moments = fed(parts)
        assert moments.mean == pytest.approx(whole.mean, rel=1e-9, abs=1e-9)
        assert moments.std == pytest.approx(whole.std, rel=1e-6, abs=1e-6)


@KINDS
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -1e30])
def test_trap_a6_nothing_off_the_mask_has_an_effect(kind, garbage):
    clean, dirty = RunningMoments(kind), RunningMoments(kind)
    mask_N = torch.tensor([True, False, True])
    clean.update(torch.tensor([1.0, 0.0, 3.0]), mask_N)
    dirty.update(torch.tensor([1.0, garbage, 3.0]), mask_N)
    dirty.update(torch.full((3,), garbage), torch.zeros(3, dtype=torch.bool))  # an empty batch has no effect
    dirty.update(torch.zeros(0), torch.zeros(0, dtype=torch.bool))
    assert dirty.state_dict() == clean.state_dict()


@KINDS
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_would_destroy_the_moments_is_refused(kind, bad):
    moments = fed([[1.0, 2.0]], kind)
    before = moments.state_dict()
    with pytest.raises(ValueError, match="need finite values"):
        moments.update(torch.tensor([1.0, bad]), torch.ones(2, dtype=torch.bool))
    assert moments.state_dict() == before


@KINDS
@pytest.mark.parametrize("sizes", [[9], [4, 5], [1, 0, 8]])
def test_trap_e10_moments_are_those_of_all_ranks(kind, sizes):
    generator = torch.Generator().manual_seed(0)
    x_N = torch.randn(2, 9, generator=generator, dtype=torch.float64)
    mask_N = torch.rand(2, 9, generator=generator) < 0.7
    slices = [slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]

    def of(part, reduce=lambda x: x):
        moments = RunningMoments(kind, beta=0.7)
        for step in range(2):
            moments.update(x_N[step, part], mask_N[step, part], reduce)
        return torch.tensor([[moments.mean, moments.std, moments.count]], dtype=torch.float64)

    expected = of(slice(None)).expand(len(sizes), 3)
    torch.testing.assert_close(over_ranks(slices, of), expected, rtol=1e-12, atol=1e-12)


@KINDS
def test_trap_g2_moments_survive_a_restart_through_json(kind):
    moments = fed(BATCHES[:2], kind, beta=0.9)
    later = RunningMoments(kind, beta=0.9)
    later.load_state_dict(json.loads(json.dumps(moments.state_dict())))
    assert later.state_dict() == moments.state_dict()
    for each in (moments, later):
        each.update(torch.tensor([5.0, 6.0]), torch.ones(2, dtype=torch.bool))
    assert later.state_dict() == moments.state_dict()
    assert (later.mean, later.std, later.scale) == (moments.mean, moments.std, moments.scale)


def test_moments_of_scores_are_their_mean_and_population_std_over_all_ranks():
    scores_S = torch.tensor([1.0, 2.0, 4.0, 5.0])
    assert score_moments(scores_S) == (3.0, pytest.approx(math.sqrt(2.5)))
    parts = scores_S.split([1, 0, 3])
    moments = over_ranks(parts, lambda part, reduce: torch.tensor(score_moments(part, reduce)))
    assert moments.tolist() == pytest.approx([3.0, math.sqrt(2.5)] * 3)


@pytest.mark.parametrize(
    ("unbiased", "shift_mean", "first_row", "last"),
    [
        (False, False, [0.0508, 0.4381, 0.8254], 3.1492),
        (True, False, [0.1394, 0.5046, 0.8697], 3.0606),
        (False, True, [-1.5492, -1.1619, -0.7746], 1.5492),
        (True, True, [-1.4606, -1.0954, -0.7303], 1.4606),
    ],
)
def test_seed_a27_the_whitening_table_of_the_text(unbiased, shift_mean, first_row, last):
    """The table of "The N implementation details of RLHF with PPO": TensorFlow's and PyTorch's variances."""
    x = torch.tensor([[1.2, 1.3, 1.4], [1.5, 1.6, 1.7], [1.8, 1.9, 2.0]])
    y = whiten(x.flatten(), torch.ones(9, dtype=torch.bool), shift_mean=shift_mean, unbiased=unbiased).view(3, 3)
    assert y[0].tolist() == pytest.approx(first_row, abs=5e-5)
    assert float(y[2, 2]) == pytest.approx(last, abs=5e-5)

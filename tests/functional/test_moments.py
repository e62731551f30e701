from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realign.functional.moments import MomentsKind, RunningMoments, score_moments
from tests.functional.test_normalization import over_ranks

CUMULATIVE, EXPONENTIAL = MomentsKind.cumulative, MomentsKind.exponential
KINDS = pytest.mark.parametrize("kind", MomentsKind)


def fed(batches, kind=CUMULATIVE, **options):
    moments = RunningMoments(kind, **options)
    for values in batches:
        x_N = torch.tensor(values, dtype=torch.float64)
        moments.update(x_N, torch.ones(len(x_N), dtype=torch.bool))
    return moments


def trlx(batches):
    """Compute trlX's running moments: the mean and the sample std of all values so far."""
    mean, var, count = 0.0, 1.0, 1e-24
    for values in batches:
        n, batch_mean, batch_var = len(values), np.mean(values), np.var(values)
        delta, total = batch_mean - mean, count + n
        var = (var * count + delta**2 * count * n / total + batch_var * n) / total
        mean, count = mean + delta * n / total, total
    return mean, math.sqrt(var * count / (count - 1))


def realhf(batches, beta):
    """Compute realhf's exponential moments: averages of values and squares, both divided by 1 - beta^updates."""
    mean = square = debias = 0.0
    for values in batches:
        mean = beta * mean + (1 - beta) * np.mean(values)
        square = beta * square + (1 - beta) * np.mean(np.square(values))
        debias = beta * debias + 1 - beta
    return mean / debias, math.sqrt(square / debias - (mean / debias) ** 2)


BATCHES = [[1.0, 2.0, 4.0], [10.0], [-3.0, 0.5], [2.0] * 5]


def test_cumulative_moments_are_those_of_trlx_and_of_all_values():
    moments = fed(BATCHES)
    assert (moments.mean, moments.std) == pytest.approx(trlx(BATCHES), rel=1e-12)
    everything = np.concatenate(BATCHES)
    assert (moments.mean, moments.std) == pytest.approx((everything.mean(), everything.std(ddof=1)), rel=1e-12)
    assert moments.count == len(everything)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.99999])
def test_exponential_moments_are_those_of_realhf(beta):
    for n in range(1, len(BATCHES) + 1):
        moments = fed(BATCHES[:n], EXPONENTIAL, beta=beta)
        assert (moments.mean, moments.std) == pytest.approx(realhf(BATCHES[:n], beta), rel=1e-7, abs=1e-12)


def test_by_hand():
    moments = fed([[1.0, 3.0]], EXPONENTIAL, beta=0.9)
    assert (moments.mean, moments.std) == (2.0, 1.0)  # no bias towards the initial value 0
    moments = fed([[1.0, 3.0], [8.0]], EXPONENTIAL, beta=0.5)
    assert moments.mean == pytest.approx((2 * 1 + 8 * 2) / 3)
    assert moments.std**2 == pytest.approx((5 * 1 + 64 * 2) / 3 - 36)
    moments = fed([[1.0, 3.0], [8.0]])
    assert (moments.mean, moments.std) == (4.0, math.sqrt(13))


@KINDS
def test_before_the_first_update_nothing_is_changed(kind):
    moments = RunningMoments(kind)
    assert (moments.mean, moments.std, moments.count) == (0, 1, 0)
    x_N = torch.tensor([3.0, -1.0])
    assert torch.equal(moments.normalize(x_N), x_N)
    assert torch.equal(moments.denormalize(x_N), x_N)


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


@settings(deadline=None)  # the machine may be busy
@given(batches, st.sampled_from(MomentsKind), st.lists(st.floats(-1e3, 1e3), min_size=1))
def test_denormalize_undoes_normalize(values, kind, xs):
    moments = fed(values, kind)
    x_N = torch.tensor(xs, dtype=torch.float64)
    torch.testing.assert_close(moments.denormalize(moments.normalize(x_N)), x_N, rtol=1e-9, atol=1e-7)


def test_normalised_values_have_mean_0_and_deviation_1():
    rng = np.random.default_rng(0)
    x_N = torch.tensor(rng.normal(size=1000) * 3 + 7)
    moments = RunningMoments(eps=0.0)
    moments.update(x_N, torch.ones(1000, dtype=torch.bool))
    out_N = moments.normalize(x_N)
    assert (out_N.mean().item(), out_N.std().item()) == (pytest.approx(0, abs=1e-12), pytest.approx(1))
    assert RunningMoments().normalize(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.float32
    slack = RunningMoments(eps=1.0)
    slack.update(torch.tensor([-1.0, 1.0]), torch.ones(2, dtype=torch.bool))
    assert slack.normalize(torch.tensor([1.0])).item() == pytest.approx(1 / (math.sqrt(2) + 1))


@KINDS
@pytest.mark.parametrize("value", [0.0, 0.95, -1e6])
def test_trap_e3_values_that_were_all_one_are_shifted_and_not_blown_up(kind, value):
    moments = fed([[value] * 7, [value]], kind)
    x_N = torch.tensor([value, value + 2], dtype=torch.float64)
    assert moments.normalize(x_N).tolist() == pytest.approx([0, 2], abs=1e-6)
    assert moments.denormalize(moments.normalize(x_N)).tolist() == pytest.approx(x_N.tolist())


@KINDS
def test_trap_e3_squares_are_not_subtracted(kind):
    moments = fed([[1e8 + 1, 1e8 + 3], [1e8 + 5, 1e8 + 7]], kind, beta=0.5)
    expected = math.sqrt(20 / 3) if kind is CUMULATIVE else math.sqrt(1 + 16 * 2 / 9)
    assert moments.std == pytest.approx(expected, rel=1e-6)


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


def test_moments_of_one_kind_do_not_go_on_as_the_other():
    saved = fed(BATCHES, CUMULATIVE).state_dict()
    with pytest.raises(ValueError, match="the saved running moments have kind cumulative, expected exponential"):
        RunningMoments(EXPONENTIAL).load_state_dict(saved)


def test_settings_are_checked_and_a_kind_may_be_given_by_name():
    assert RunningMoments("exponential").kind is EXPONENTIAL
    with pytest.raises(ValueError, match="'ema'"):
        RunningMoments("ema")
    for beta in (-0.1, 1.0):
        with pytest.raises(ValueError, match=f"beta .* found {beta}"):
            RunningMoments(EXPONENTIAL, beta=beta)
    with pytest.raises(ValueError, match="eps"):
        RunningMoments(eps=-1.0)
    with pytest.raises(ValueError, match="mask_N has dtype"):
        RunningMoments().update(torch.zeros(2), torch.zeros(2))


def test_moments_of_scores_are_their_mean_and_population_std_over_all_ranks():
    scores_S = torch.tensor([1.0, 2.0, 4.0, 5.0])
    assert score_moments(scores_S) == (3.0, pytest.approx(math.sqrt(2.5)))
    parts = scores_S.split([1, 0, 3])
    found = over_ranks(parts, lambda part, reduce: torch.tensor(score_moments(part, reduce)))
    assert found.tolist() == pytest.approx([3.0, math.sqrt(2.5)] * 3)


def test_without_scores_both_moments_are_nan():
    assert all(map(math.isnan, score_moments(torch.zeros(0))))


def test_the_number_of_elements_is_state_and_not_a_setting():
    with pytest.raises(TypeError, match="count"):
        RunningMoments(count=1.0)

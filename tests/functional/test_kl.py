from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realign.functional.kl import LOG_RATIO_LIMIT, KLEstimator, kl_estimate, log_ratio

Z = [0.3, -0.2, 0.5]
REF = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
ALL = torch.ones(3, dtype=torch.bool)
LOGPROB = st.floats(-15, 0)


def expected_estimate(z, estimator):
    """Return the exact expectation of an estimator over the three words that the policy softmax(z) may sample."""
    logp = z.log_softmax(0)
    return (logp.detach().exp() * kl_estimate(logp, REF.log(), ALL, estimator)).sum()


def exact(z):
    logp = z.log_softmax(0)
    return (logp.exp() * (logp - REF.log())).sum()


@pytest.mark.parametrize(
    ("estimator", "gradient"),
    [
        (KLEstimator.k1, [0.0, 0.0, 0.0]),
        (KLEstimator.k2, [0.138796, -0.219580, 0.080784]),
        (KLEstimator.k3, [0.153615, -0.285522, 0.131906]),
    ],
)
def test_trap_c5_expected_gradients(estimator, gradient):
    z = torch.tensor(Z, dtype=torch.float64, requires_grad=True)
    expected_estimate(z, estimator).backward()
    assert z.grad.tolist() == pytest.approx(gradient, abs=1e-6)


def weighted(logprobs_T, old_T, ref_T, mask_T, estimator):
    """Return the estimate under tokens of another policy, times the differentiable ratio to it."""
    return log_ratio(logprobs_T, old_T, mask_T)[0].exp() * kl_estimate(logprobs_T, ref_T, mask_T, estimator)


OLD = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)


@pytest.mark.parametrize("old", [OLD, torch.tensor(Z, dtype=torch.float64).softmax(0)], ids=["off-policy", "on-policy"])
@pytest.mark.parametrize("estimator", [KLEstimator.k1, KLEstimator.k3])
def test_weighted_k1_and_k3_have_the_value_and_the_gradient_of_the_exact_kl_under_any_sampler(estimator, old):
    z = torch.tensor(Z, dtype=torch.float64, requires_grad=True)
    kl = (old * weighted(z.log_softmax(0), old.log(), REF.log(), ALL, estimator)).sum()
    true = exact(z)
    assert kl.item() == pytest.approx(true.item(), abs=1e-12)
    got, want = (torch.autograd.grad(x, z)[0].tolist() for x in (kl, true))
    assert got == pytest.approx(want, abs=1e-12)
    plain = (old * kl_estimate(z.log_softmax(0), REF.log(), ALL, estimator)).sum()
    assert torch.autograd.grad(plain, z)[0].tolist() != pytest.approx(want, abs=1e-3)


@pytest.mark.parametrize("estimator", [KLEstimator.k2, KLEstimator.k3, KLEstimator.abs])
def test_trap_c6_a_descent_step_brings_the_policy_closer(estimator):
    z = torch.tensor(Z, dtype=torch.float64, requires_grad=True)
    expected_estimate(z, estimator).backward()
    assert exact(z - 0.1 * z.grad) < exact(z)


def test_trap_c6_a_reward_of_minus_k1_brings_the_policy_closer():
    z = torch.tensor(Z, dtype=torch.float64, requires_grad=True)
    logp = z.log_softmax(0)
    reward = -kl_estimate(logp, REF.log(), ALL, KLEstimator.k1).detach()
    (-(logp.exp() * reward).sum()).backward()
    assert exact(z - 0.1 * z.grad) < exact(z)


@settings(deadline=None)  # the machine may be busy
@given(LOGPROB, LOGPROB)
def test_estimators_equal_their_formulas(logp, ref):
    d = logp - ref
    formulas = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d, "abs": abs(d)}
    assert set(formulas) == {estimator.value for estimator in KLEstimator}
    for estimator in KLEstimator:
        got = kl_estimate(*torch.tensor([[logp], [ref]], dtype=torch.float64), ALL[:1], estimator)
        assert float(got) == pytest.approx(formulas[estimator.value], rel=1e-9, abs=1e-9)
        assert estimator is KLEstimator.k1 or float(got) >= 0


@pytest.mark.parametrize("shift", [100.0, -100.0])
def test_trap_b10_a_huge_log_ratio_stays_finite_and_is_counted(shift):
    logprobs_T = torch.tensor([shift, 0.5, 100.0], requires_grad=True)
    ratio_T, clamped_T = log_ratio(logprobs_T, torch.zeros(3), torch.tensor([True, True, False]))
    assert ratio_T.tolist() == [math.copysign(LOG_RATIO_LIMIT, shift), 0.5, 0.0]
    assert clamped_T.tolist() == [True, False, False]
    for estimator in KLEstimator:
        assert kl_estimate(logprobs_T, torch.zeros(3), ALL, estimator).isfinite().all()


def test_log_ratios_are_fp32_and_no_gradient_reaches_the_reference():
    logprobs_T = torch.tensor([-1.0], dtype=torch.bfloat16, requires_grad=True)
    ref_T = torch.tensor([-2.0], dtype=torch.bfloat16, requires_grad=True)
    kl_T = kl_estimate(logprobs_T, ref_T, ALL[:1], KLEstimator.k3)
    assert kl_T.dtype == torch.float32
    kl_T.sum().backward()
    assert logprobs_T.grad is not None
    assert ref_T.grad is None


def test_a_nan_on_the_mask_is_not_hidden():
    assert kl_estimate(torch.tensor([math.nan]), torch.zeros(1), ALL[:1], KLEstimator.k3).isnan().all()


@pytest.mark.parametrize(
    ("shift", "bias", "deviation"), [(0.1, [0, 0.002, 0], [20, 1.42, 1.42]), (1.0, [0, 0.25, 0], [2, 1.73, 1.7])]
)
def test_seed_b10_bias_and_deviation_of_k1_k2_and_k3_of_the_text(shift, bias, deviation):
    """The program of "Approximating KL divergence": q = N(0, 1), p = N(shift, 1), relative to the true KL(q || p).

    It draws ten million samples; here a sum over a fine grid takes their place.
    """
    x = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    q, p = (torch.distributions.Normal(torch.tensor(m, dtype=torch.float64), 1.0) for m in (0.0, shift))
    weight = q.log_prob(x).exp() / q.log_prob(x).exp().sum()
    true = shift**2 / 2
    kinds = (KLEstimator.k1, KLEstimator.k2, KLEstimator.k3)
    for kind, wanted_bias, wanted_deviation in zip(kinds, bias, deviation, strict=True):
        k = kl_estimate(q.log_prob(x), p.log_prob(x), torch.ones_like(x, dtype=torch.bool), kind)
        mean = (weight * k).sum()
        assert float((mean - true) / true) == pytest.approx(wanted_bias, abs=6e-4)
        assert float((weight * (k - mean).square()).sum().sqrt() / true) == pytest.approx(wanted_deviation, abs=6e-3)

from __future__ import annotations

import math

import pytest
import torch

from realign.api import Mean, stat_values
from realign.errors import RunError, SettingsError
from realign.functional import KLEstimator, identity, importance_weighted_kl, kl_estimate, segment_sum
from realign.interfaces.components import KLControl, KLPenalty, KLPlace
from realign.testing import random_batch

KEYS = ["input_ids", "loss_mask", "logprobs", "ref_logprobs"]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"coef": -0.1}, r"coef=-0\.1: must be at least 0"),
        ({"coef": math.nan}, "coef=nan: must be at least 0"),
        ({"target": 6.0}, r"target=6: no penalty is applied\. Set place=reward"),
        ({"place": "reward", "coef": 0.0, "target": 6.0}, "coef=0: the adaptive controller .target. multiplies coef"),
        ({"place": "loss", "estimator": "k1"}, "estimator=k1: its expected gradient in the loss is 0"),
        ({"importance_weighted": True}, "importance_weighted=true: has no effect with place=none"),
        ({"place": "reward", "importance_weighted": True}, "importance_weighted=true: has no effect with place=reward"),
        ({"place": "both"}, r"place='both': unknown choice \(valid: none, reward, loss\)"),
        ({"place": "loss", "estimator": "k4"}, "estimator='k4': unknown choice"),
        ({"place": "reward", "target": 1.0, "horizon": 0}, "horizon=0: must be at least 1"),
    ],
)
def test_a_penalty_that_could_do_nothing_raises(settings, text):
    with pytest.raises(SettingsError, match=text):
        KLPenalty(**settings)


def test_an_unset_estimator_is_k1_in_the_reward_and_k3_in_the_loss():
    chosen = {place: KLPenalty(place).chosen_estimator for place in ("reward", "loss")}
    assert chosen == {"reward": KLEstimator.k1, "loss": KLEstimator.k3}
    assert KLPenalty("reward", estimator="abs").chosen_estimator is KLEstimator.abs


def test_a_penalty_needs_the_reference_only_where_it_is_applied():
    assert KLPenalty().needs() == {}
    for place in ("reward", "loss"):
        assert KLPenalty(place).needs() == {"ref_logprobs": f"kl.place={place}"}


@pytest.mark.parametrize("place", KLPlace)
def test_the_penalty_is_in_the_reward_or_in_the_loss_and_never_in_both(place):
    control, data = KLControl(KLPenalty(place, 0.3)), random_batch(1).select(KEYS)
    kl_T, price = control.in_reward(data)
    assert (kl_T is None, price) == ((False, 0.3) if place is KLPlace.reward else (True, 0.0))
    assert control.is_in_loss == (place is KLPlace.loss)


def test_the_penalty_in_the_reward_is_that_of_the_old_policy():
    control, data = KLControl(KLPenalty("reward", 0.3)), random_batch(1)
    sampled, recomputed = data.select(KEYS), data.select([*KEYS, "prox_logprobs"])
    for batch, key in ((sampled, "logprobs"), (recomputed, "prox_logprobs")):
        want_T = torch.where(data["loss_mask"], data[key] - data["ref_logprobs"], 0)
        torch.testing.assert_close(control.in_reward(batch)[0], want_T)


def test_the_penalty_in_the_loss_is_differentiable_and_its_metric_is_the_mean_of_the_kl():
    control, data = KLControl(KLPenalty("loss", 0.3, "k2")), random_batch(1).select(KEYS)
    logprobs_T = data["logprobs"].clone().requires_grad_()
    loss_T, stats = control.in_loss(None, logprobs_T, data, 1.0)
    mask_T = data["loss_mask"]
    kl_T = kl_estimate(data["logprobs"], data["ref_logprobs"], mask_T, KLEstimator.k2)
    torch.testing.assert_close(loss_T.detach(), 0.3 * kl_T)
    assert stat_values(stats)["ref_kl"] == pytest.approx(float(kl_T[mask_T].mean()))
    (grad_T,) = torch.autograd.grad(loss_T.sum(), logprobs_T)
    assert grad_T[mask_T].any()
    assert not grad_T[~mask_T].any()


@pytest.mark.parametrize("estimator", [None, *KLEstimator])
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_weighted_penalty_uses_the_old_policy_of_ratios_and_its_metric_is_weighted_too(estimator, recomputed):
    control = KLControl(KLPenalty("loss", 0.3, estimator, importance_weighted=True))
    data = random_batch(1).select([*KEYS, "prox_logprobs"] if recomputed else KEYS)
    mask_T, old_T = data["loss_mask"], data["prox_logprobs"] if recomputed else data["logprobs"]
    logprobs_T = (data["logprobs"] + 0.2 * data["ref_logprobs"]).requires_grad_()
    loss_T, stats = control.in_loss(None, logprobs_T, data, 1.0)
    kl_T = importance_weighted_kl(logprobs_T, old_T, data["ref_logprobs"], mask_T, estimator or KLEstimator.k3)
    assert torch.equal(loss_T, 0.3 * kl_T)
    assert stat_values(stats)["ref_kl"] == pytest.approx(float(kl_T[mask_T].mean()))
    (grad_T,) = torch.autograd.grad(loss_T.sum(), logprobs_T)
    (plain_T,) = torch.autograd.grad(
        0.3 * kl_estimate(logprobs_T, data["ref_logprobs"], mask_T, control.penalty.chosen_estimator).sum(), logprobs_T
    )
    assert not torch.allclose(grad_T, plain_T)
    assert not grad_T[~mask_T].any()


def test_metrics_of_a_batch_are_per_trained_sequence():
    data = random_batch(1).select(KEYS)
    mask_T, cu_seqlens = data["loss_mask"], data.cu_seqlens()
    kl_S = segment_sum(torch.where(mask_T, data["logprobs"] - data["ref_logprobs"], 0), cu_seqlens)
    trained_S = segment_sum(mask_T, cu_seqlens) > 0
    found = stat_values(KLControl(KLPenalty("reward")).stats(data))
    assert found["ref_kl_per_sequence"] == pytest.approx(float(kl_S[trained_S].mean()), rel=1e-5)
    assert "ref_kl" in found
    assert "ref_kl" not in KLControl(KLPenalty("loss")).stats(data)  # the loss reports this metric itself
    assert KLControl(KLPenalty("loss")).stats(data.select(["input_ids", "loss_mask", "logprobs"])) == {}


def per_sequence(kl: float, sequences: int) -> dict:
    return {"ref_kl_per_sequence": Mean(torch.tensor(kl * sequences), torch.tensor(float(sequences)))}


def test_an_adaptive_coefficient_follows_the_kl_over_all_ranks_and_the_metric_is_the_one_before():
    control = KLControl(KLPenalty("reward", 0.1, target=1.0, horizon=100))
    metric = control.update(per_sequence(5.0, 10), lambda x: 2 * x)  # the second rank has the same values
    assert stat_values(metric)["kl_coef"] == pytest.approx(0.1)
    assert control.coef == pytest.approx(0.1 * (1 + 0.2 * 20 / 100))
    control.update(per_sequence(0.0, 0), identity)  # without trained tokens the KL is unknown
    assert control.coef == pytest.approx(0.1 * (1 + 0.2 * 20 / 100))


def test_a_fixed_coefficient_stays_and_an_unapplied_one_is_not_reported():
    control = KLControl(KLPenalty("loss", 0.3))
    assert stat_values(control.update(per_sequence(5.0, 10), identity)) == {"kl_coef": pytest.approx(0.3)}
    assert control.coef == 0.3
    assert KLControl(KLPenalty(coef=0.3)).update({}, identity) == {}


def test_a_batch_too_large_for_the_horizon_raises_an_error_that_names_it():
    control = KLControl(KLPenalty("reward", 0.1, target=1.0, horizon=20))
    control.update(per_sequence(5.0, 99), identity)
    with pytest.raises(SettingsError, match=r"kl\.horizon=20: must be above 20 for a batch of 100 trained sequences"):
        control.update(per_sequence(5.0, 100), identity)


def test_a_kl_that_is_not_finite_ends_the_run():
    control = KLControl(KLPenalty("reward", 0.1, target=1.0))
    with pytest.raises(RunError, match=r"KL to the reference policy is nan"):
        control.update(per_sequence(math.nan, 4), identity)


def test_the_coefficient_is_restored_and_settings_are_not_changed():
    penalty = KLPenalty("reward", 0.1, target=1.0, horizon=100)
    control, other = KLControl(penalty), KLControl(penalty)
    control.update(per_sequence(5.0, 10), identity)
    assert (penalty.coef, other.coef) == (0.1, 0.1)
    other.load_state_dict(control.state_dict())
    assert other.coef == control.coef != 0.1


def test_the_launch_table_lists_the_penalty():
    assert KLPenalty().describe() == "not applied"
    assert KLPenalty(coef=0.3).describe() == "not applied (kl.coef=0.3 is not read)"
    assert KLPenalty("loss", 0.3).describe() == "in the loss, k3, coefficient 0.3"
    weighted = KLPenalty("loss", 0.3, importance_weighted=True).describe()
    assert weighted == "in the loss, k3, weighted by the policy ratio, coefficient 0.3"

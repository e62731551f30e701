from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from realign.api import Mean, MicroBatchSpec, Model, rl_graph, stat_values
from realign.errors import RunError, SettingsError
from realign.functional import KLEstimator, identity, kl_estimate, log_ratio, segment_sum
from realign.interfaces.components import KLControl, KLPenalty, KLPlace
from realign.interfaces.components.kl import AdaptiveKLController, FixedKLController
from realign.interfaces.components.objectives import ThresholdKLController
from realign.interfaces.ppo import PPOActorInterface
from realign.testing import BigramEngine, random_batch, train_once

KEYS = ["input_ids", "loss_mask", "logprobs", "ref_logprobs"]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"target": 6.0}, r"target=6: has no effect with place=none\. Set place=reward"),
        ({"coef": 0.1}, r"coef=0\.1: has no effect with place=none\. Set place=reward"),
        ({"estimator": "k3"}, r"estimator=k3: has no effect with place=none\. Set place=reward"),
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
    control, data = KLControl(KLPenalty(place)), random_batch(1).select(KEYS)
    kl_T, price = control.in_reward(data)
    assert (kl_T is None, price) == ((False, 0.05) if place is KLPlace.reward else (True, 0.0))
    assert control.is_in_loss == (place is KLPlace.loss)


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
    kl_T = kl_estimate(logprobs_T, data["ref_logprobs"], mask_T, estimator or KLEstimator.k3)
    kl_T = log_ratio(logprobs_T, old_T, mask_T)[0].exp() * kl_T
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
    metrics = stat_values(KLControl(KLPenalty("reward")).stats(data))
    assert metrics["ref_kl_per_sequence"] == pytest.approx(float(kl_S[trained_S].mean()), rel=1e-5)
    assert "ref_kl" in metrics
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


def test_a_kl_that_is_not_finite_ends_the_run():
    control = KLControl(KLPenalty("reward", 0.1, target=1.0))
    with pytest.raises(RunError, match=r"KL to the reference policy is nan"):
        control.update(per_sequence(math.nan, 4), identity)


@dataclass
class Hinge(KLPenalty):
    """Only log-ratios above `free` nats cost."""

    free: float = 0.1

    def estimate(self, logprobs_T, ref_logprobs_T):
        return (logprobs_T - ref_logprobs_T - self.free).clamp(min=0)


def hinge(logprobs_T, data, free=0.1):
    return torch.where(data["loss_mask"], (logprobs_T - data["ref_logprobs"] - free).clamp(min=0), 0)


@pytest.mark.parametrize("weighted", [False, True])
def test_an_own_estimate_is_in_the_loss_with_its_gradient_and_metrics(weighted):
    data = random_batch(1).select(KEYS)
    interface = PPOActorInterface(kl=Hinge("loss", 0.3, importance_weighted=weighted))
    logprobs_T = (data["logprobs"] + 0.1).requires_grad_()
    loss_T, stats = interface.kl_control.in_loss(None, logprobs_T, data, 1.0)
    kl_T = hinge(logprobs_T, data)
    kl_T = torch.where(data["loss_mask"], (logprobs_T - data["logprobs"]).exp(), 1) * kl_T if weighted else kl_T
    torch.testing.assert_close(loss_T, 0.3 * kl_T)
    assert 0 < float((kl_T > 0).sum()) < data["loss_mask"].sum()
    gradient, want = (torch.autograd.grad(x.sum(), logprobs_T, retain_graph=True)[0] for x in (loss_T, 0.3 * kl_T))
    torch.testing.assert_close(gradient, want)
    mean = float(kl_T.detach()[data["loss_mask"]].mean())
    assert stat_values(stats)["ref_kl"] == pytest.approx(mean)
    rewarded = data.with_sequences(rewards=torch.arange(data.n_sequences).double())
    metrics = train_once(interface, rewarded, MicroBatchSpec()).metrics
    kl_S = segment_sum(hinge(data["logprobs"], data), data.cu_seqlens())
    trained_S = segment_sum(data["loss_mask"], data.cu_seqlens()) > 0
    assert metrics["ref_kl_per_sequence"] == pytest.approx(float(kl_S[trained_S].mean()))
    assert metrics["kl_coef"] == pytest.approx(0.3)


def test_an_own_estimate_cannot_be_combined_with_the_exact_kl():
    with pytest.raises(SettingsError, match=r"full_vocabulary=true: the exact KL would replace Hinge\.estimate"):
        Hinge("loss", full_vocabulary=True)


def test_a_control_of_the_user_adapts_the_coefficient():
    class Doubling(KLControl):
        def update(self, stats, reduce):
            self.controller = FixedKLController(2 * self.coef)
            return {}

    class Doubled(KLPenalty):
        def control(self):
            return Doubling(self)

    interface = PPOActorInterface(kl=Doubled("reward", 0.1))
    interface.train_step(Model("actor", BigramEngine()), random_batch(1).select([*KEYS, "rewards"]), MicroBatchSpec())
    assert interface.kl_control.coef == 0.2


@pytest.mark.parametrize(
    "settings", [{"place": "loss"}, {"place": "reward"}, {"place": "loss", "full_vocabulary": True}], ids=str
)
def test_a_coefficient_of_0_needs_no_reference(settings):
    interface = PPOActorInterface(kl=KLPenalty(coef=0.0, **settings))
    assert not interface.kl.applied
    assert "ref_logprobs" not in interface.keys("train_step").needs
    calls = rl_graph({"actor": interface}).rpcs
    assert [rpc.model for rpc in calls] == ["actor", "reward", "actor"]
    place = settings["place"]
    assert interface.describe(4)["KL to reference"] == f"not applied, since kl.coef=0 (kl.place={place} is not read)"
    data = random_batch(1).select(["input_ids", "loss_mask", "logprobs", "rewards"])
    trained, off = (train_once(x, data, MicroBatchSpec()) for x in (interface, PPOActorInterface()))
    assert torch.equal(trained.parameters[0], off.parameters[0])
    assert trained.metrics == off.metrics


@pytest.mark.parametrize(
    ("kl", "n_steps", "expected"),
    [
        (6.0, 64, 0.15),  # no error, so no change
        (6.6, 1000, 0.15 * (1 + 0.1 * 0.1)),
        (5.4, 1000, 0.15 * (1 - 0.1 * 0.1)),
        (600.0, 1000, 0.15 * (1 + 0.2 * 0.1)),  # clipped above
        (-3.0, 1000, 0.15 * (1 - 0.2 * 0.1)),  # clipped below; a sampled KL may be negative
        (600.0, 10000, 0.15 * 1.2),
        (600.0, 0, 0.15),
    ],
)
def test_trap_c9_adaptive_controller(kl, n_steps, expected):
    controller = AdaptiveKLController(init=0.15, target=6.0, horizon=10000)
    controller.update(kl, n_steps)
    assert controller.value == pytest.approx(expected, rel=1e-12)


def test_trap_c9_masked_sequences_do_not_dilute_the_kl():
    from realign.functional.packed import cu_seqlens_of, segment_sum

    cu_seqlens = cu_seqlens_of([2] * 8)
    mask_T = torch.ones(16, dtype=torch.bool)
    mask_T[:4] = False
    kl_T = kl_estimate(torch.full((16,), 3.0), torch.zeros(16), mask_T, KLEstimator.k1)
    trained_S = segment_sum(mask_T, cu_seqlens) > 0
    controller = AdaptiveKLController(init=0.15, target=6.0, horizon=100)
    controller.update(float(segment_sum(kl_T, cu_seqlens)[trained_S].mean()), int(trained_S.sum()))
    assert controller.value == 0.15


def test_trap_c9_controller_survives_a_resume():
    controller = AdaptiveKLController(init=0.15, target=6.0, horizon=100)
    controller.update(12.0, 64)
    resumed = AdaptiveKLController(init=0.15, target=6.0, horizon=100)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.value == controller.value != 0.15
    fixed = FixedKLController(0.05)
    fixed.update(100.0, 64)
    fixed.load_state_dict(fixed.state_dict())
    assert fixed.value == 0.05


@pytest.mark.parametrize(
    ("kl", "expected"), [(0.0, 0.5), (0.0066, 0.5), (0.0067, 1.0), (0.015, 1.0), (0.0151, 2.0), (9.0, 2.0)]
)
def test_the_threshold_controller_doubles_above_and_halves_below_its_range(kl, expected):
    controller = ThresholdKLController(init=1.0, target=0.01)
    controller.update(kl)
    assert controller.value == expected
    resumed = ThresholdKLController(init=1.0, target=0.01)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.value == controller.value

from __future__ import annotations

import math
from collections import deque
from copy import deepcopy

import numpy as np
import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, Model, SequenceSample, stat_values
from realign.functional import (
    Aggregation,
    ImportanceLevel,
    KLEstimator,
    Normalization,
    PolicyObjective,
    Scope,
    policy_objective,
)
from realign.interfaces.decoupled_ppo import DecoupledPPOActorInterface, Denominator, RatioRange, dataflow
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.ppo import KLPenalty, KLPlace, PPOActorInterface
from realign.testing import BigramEngine, check_train_step, random_batch, train_once

TOKEN, SEQUENCE, GEOMETRIC = ImportanceLevel.token, ImportanceLevel.sequence, ImportanceLevel.geometric
RAW = Normalization(Scope.none, Scope.none)


def token_values(rows: list[list[float]]) -> torch.Tensor:
    """[T] the values of each sequence's sampled tokens, 0 for its prompt token."""
    return torch.tensor([x for row in rows for x in (0.0, *row)], dtype=torch.float64)


def batch(log_weights: list[list[float]], advantages: list[list[float]] | None = None) -> SequenceSample:
    """Sequences of a prompt token and sampled ones, with these log-ratios of proximal to behaviour policy."""
    data = SequenceSample.from_sequences(["q"], {"input_ids": [[[1, *range(2, 2 + len(x))] for x in log_weights]]})
    sampled = torch.cat([torch.arange(1 + len(x)) > 0 for x in log_weights])
    behaviour = torch.full((len(sampled),), -2.0, dtype=torch.float64)
    gains = advantages or [[1.0] * len(x) for x in log_weights]
    return data.with_tokens(
        loss_mask=sampled,
        logprobs=behaviour,
        prox_logprobs=behaviour + token_values(log_weights),
        advantages=token_values(gains),
    )


class Output:
    """Log-probs that are leaves, to look at the gradient of every token."""

    def __init__(self, logprobs_T: torch.Tensor) -> None:
        self.logprobs_T = logprobs_T.clone().requires_grad_()

    def logprobs_and_entropy(self, *, temperature=1.0, where_T=None):
        return torch.where(where_T, self.logprobs_T, 0), torch.zeros_like(self.logprobs_T)


def gradient(interface: PPOActorInterface, data: SequenceSample, logprobs_T: torch.Tensor) -> torch.Tensor:
    """[T] the gradient of the divided loss by the log-probs."""
    output = Output(logprobs_T)
    (interface.loss(output, data)[0] / interface.loss_weight(data)).backward()
    return output.logprobs_T.grad


# An independent reference: one sequence, one token at a time.


def ratios(log_ratios: list[float], level: ImportanceLevel) -> list[float]:
    n = len(log_ratios)
    if level is TOKEN:
        return [math.exp(x) for x in log_ratios]
    total = sum(log_ratios) / (max(n, 1) if level is GEOMETRIC else 1)
    return [math.exp(total)] * n


def reference(interface: DecoupledPPOActorInterface, data: SequenceSample, table: np.ndarray):
    """Loss and gradient by the table of logits."""
    w, r = interface.behaviour_weight, interface.rejection
    loss, divisor, grad = 0.0, 0.0, np.zeros_like(table)
    keys = ("input_ids", "loss_mask", "logprobs", "prox_logprobs", "advantages")
    for ids, mask, behaviour, proximal, advantage in zip(*(data.sequences(k) for k in keys), strict=True):
        where = [t for t in range(len(ids)) if mask[t]]
        log_ratios = [float(proximal[t] - behaviour[t]) for t in where]
        weights = [min(max(x, w.floor or 0), w.cap or math.inf) for x in ratios(log_ratios, w.level)]
        keep = [(r.floor or 0) <= x <= (r.cap or math.inf) for x in ratios(log_ratios, r.level)]
        counted = sum(keep) if interface.denominator is Denominator.kept else len(where)
        if not counted:
            continue
        per_token = interface.aggregation is Aggregation.token_mean
        divisor += counted if per_token else 1
        share = 1 / counted if interface.aggregation is Aggregation.seq_mean_token_mean else 1
        for t, weight, kept in zip(where, weights, keep, strict=True):
            if not kept:
                continue
            before, token, a = int(ids[t - 1]), int(ids[t]), float(advantage[t])
            logp = table[before] - np.log(np.exp(table[before]).sum())
            ratio = math.exp(logp[token] - float(proximal[t]))
            held = min(max(ratio, 1 - interface.clip_low), 1 + interface.clip_high)
            value, slope = max((-a * ratio, -a * ratio), (-a * held, 0.0), key=lambda pair: pair[0])
            if interface.dual_clip and a < 0 and value > -a * interface.dual_clip:
                value, slope = -a * interface.dual_clip, 0.0
            loss += share * weight * value
            grad[before] += share * weight * slope * (np.eye(len(table))[token] - np.exp(logp))
    return loss / divisor, grad / divisor


RANGES = [
    (level, *ends) for level in ImportanceLevel for ends in ((None, None), (None, 1.05), (0.95, None), (0.9, 1.1))
]
UNBOUNDED = [x for x in RANGES if x[0] is not TOKEN and x[1:] == (None, None)]


@pytest.mark.parametrize("aggregation", [a for a in Aggregation if a is not Aggregation.constant])
@pytest.mark.parametrize("denominator", Denominator)
@pytest.mark.parametrize("rejection", [x for x in RANGES if x not in UNBOUNDED], ids=str)
def test_loss_and_gradient_agree_with_a_plain_reference(rejection, denominator, aggregation):
    if denominator is Denominator.all and rejection == (TOKEN, None, None):
        return  # refused, as a test below shows
    data = random_batch(2)
    for weight in RANGES:
        interface = DecoupledPPOActorInterface(
            behaviour_weight=RatioRange(*weight),
            rejection=RatioRange(*rejection),
            denominator=denominator,
            aggregation=aggregation,
            clip_low=0.1,
            dual_clip=1.5,
        )
        engine = BigramEngine(seed=4, lr=1.0)
        before = engine.logits_VV.clone().numpy()
        spec = MicroBatchSpec(n_microbatches=3)
        stats = stat_values(engine.train_batch(data, spec, interface.loss, interface.loss_weight))
        loss, grad = reference(interface, data, before)
        assert stats["loss"] == pytest.approx(loss, abs=1e-9)
        np.testing.assert_allclose(before - engine.logits_VV.numpy(), grad, rtol=0, atol=1e-9)


def test_trap_f1_the_behaviour_weight_is_a_constant():
    data = random_batch(1)
    logprobs_T = data["prox_logprobs"] + 0.05
    leaves = {k: data[k].clone().requires_grad_() for k in ("prox_logprobs", "logprobs")}
    grad_T = gradient(DecoupledPPOActorInterface(), data.with_tokens(**leaves), logprobs_T)
    assert all(leaf.grad is None for leaf in leaves.values())
    plain_T = gradient(PPOActorInterface(), data, logprobs_T)
    weight_T = (data["prox_logprobs"] - data["logprobs"]).exp()
    torch.testing.assert_close(grad_T, weight_T * plain_T, rtol=1e-12, atol=0)
    assert plain_T.any()


@pytest.mark.parametrize("objective", PolicyObjective)
def test_the_weight_multiplies_the_loss_of_a_token_under_every_objective(objective):
    data = random_batch(1)
    interface = DecoupledPPOActorInterface(objective=objective)
    output = Output(data["prox_logprobs"] + 0.3 * data["advantages"])
    want = policy_objective(
        output.logprobs_T,
        data["prox_logprobs"],
        data["advantages"],
        data["loss_mask"],
        data.cu_seqlens(),
        objective=objective,
        clip_low=interface.clip_low,
        clip_high=interface.clip_high,
        weight_T=(data["prox_logprobs"] - data["logprobs"]).exp(),
    ).loss_T.sum()
    loss, _ = interface.loss(output, data)
    assert loss.item() == pytest.approx(want.item(), rel=1e-12)
    found, expected = (torch.autograd.grad(x, output.logprobs_T)[0] for x in (loss, want))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_trap_f2_what_is_rejected_leaves_the_divisor_unless_it_is_asked_to_stay():
    data = batch([[0.0, 2.0, -1.0], [0.0, 3.0, 3.0]])
    cap = RatioRange(cap=2.0)
    kept = DecoupledPPOActorInterface(rejection=cap)
    truncated = DecoupledPPOActorInterface(behaviour_weight=cap)
    everything = DecoupledPPOActorInterface(rejection=cap, denominator=Denominator.all)
    assert [float(x.loss_weight(data)) for x in (kept, truncated, everything)] == [3, 6, 6]
    now_T = data["prox_logprobs"]  # ratio 1: a token's gradient is minus its weight, divided
    e = math.exp(-1)
    assert gradient(kept, data, now_T).tolist() == pytest.approx([0, -1 / 3, 0, -e / 3, 0, -1 / 3, 0, 0])
    assert gradient(everything, data, now_T).tolist() == pytest.approx([0, -1 / 6, 0, -e / 6, 0, -1 / 6, 0, 0])
    assert gradient(truncated, data, now_T).tolist() == pytest.approx(
        [0, -1 / 6, -2 / 6, -e / 6, 0, -1 / 6, -2 / 6, -2 / 6]
    )


def test_trap_f2_sequences_that_lost_a_token_are_averaged_over_the_others():
    data = batch([[0.0, 2.0, 0.0], [3.0]])
    mode = Aggregation.seq_mean_token_mean
    kept = DecoupledPPOActorInterface(rejection=RatioRange(cap=2.0), aggregation=mode)
    assert gradient(kept, data, data["prox_logprobs"]).tolist() == pytest.approx([0, -0.5, 0, -0.5, 0, 0])
    everything = DecoupledPPOActorInterface(
        rejection=RatioRange(cap=2.0), aggregation=mode, denominator=Denominator.all
    )
    assert gradient(everything, data, data["prox_logprobs"]).tolist() == pytest.approx([0, -1 / 6, 0, -1 / 6, 0, 0])


def test_trap_f3_metrics_of_the_weights_exist_where_both_policies_are_known_and_only_there():
    data = random_batch(1)
    assert not [k for k in train_once(PPOActorInterface(), data, MicroBatchSpec()).metrics if "behaviour" in k]
    interface = DecoupledPPOActorInterface(
        behaviour_weight=RatioRange(cap=1.1), rejection=RatioRange(SEQUENCE, cap=1.05)
    )
    assert "prox_logprobs" in interface.keys("train_step").needs
    assert "prox_logprobs" not in interface.keys("generate").needs
    metrics = stat_values(interface.batch_stats(data))
    ratio, truncated, rejected, kept = [], 0, 0, []
    for mask, behaviour, proximal in zip(
        *(data.sequences(k) for k in ("loss_mask", "logprobs", "prox_logprobs")), strict=True
    ):
        mine = ratios((proximal - behaviour)[mask].tolist(), TOKEN)
        out = math.prod(mine) > 1.05
        ratio += mine
        truncated += sum(x > 1.1 for x in mine)
        rejected += len(mine) * out
        kept += [] if out else [min(x, 1.1) for x in mine]
    want = {
        "behaviour_kl": np.mean([x - 1 - math.log(x) for x in ratio]),
        "behaviour_weight_mean": np.mean(kept),
        "behaviour_weight_max": max(kept),
        "behaviour_truncated_fraction": truncated / len(ratio),
        "behaviour_rejected_fraction": rejected / len(ratio),
    }
    assert 0 < want["behaviour_truncated_fraction"] < 1
    assert 0 < want["behaviour_rejected_fraction"] < 1
    assert {k: metrics[k] for k in want} == pytest.approx(want, rel=1e-5)
    assert "behaviour_rejected_fraction" not in stat_values(DecoupledPPOActorInterface().batch_stats(data))


def test_trap_f4_a_response_is_rejected_as_a_whole_whatever_its_tokens_say():
    """The second token's own ratio and advantage are harmless, but its response is out."""
    data = batch([[0.5, -0.25, 0.75], [0.1, -0.2]], [[-0.5, 0.25, -0.25], [1.0, 1.0]])
    for level, cap in ((SEQUENCE, 1.5), (GEOMETRIC, 1.2)):
        interface = DecoupledPPOActorInterface(rejection=RatioRange(level, cap=cap))
        assert interface.corrected(data)["loss_mask"].tolist() == [False] * 5 + [True] * 2
        assert float(interface.loss_weight(data)) == 2
    token = DecoupledPPOActorInterface(rejection=RatioRange(TOKEN, cap=1.5))
    assert token.corrected(data)["loss_mask"].tolist() == [False, False, True, False, False, True, True]


@pytest.mark.parametrize("denominator", Denominator)
@pytest.mark.parametrize("level", ImportanceLevel)
def test_trap_f5_what_is_rejected_has_no_gradient(level, denominator):
    data = batch([[1.0, 1.0], [0.0, 0.0]])
    interface = DecoupledPPOActorInterface(rejection=RatioRange(level, cap=1.5), denominator=denominator)
    grad_T = gradient(interface, data, data["prox_logprobs"] + 0.1)
    assert not grad_T[:3].any()
    assert grad_T[4:].all()


@pytest.mark.parametrize("objective", PolicyObjective)
def test_trap_f5_what_is_rejected_has_no_gradient_under_any_objective(objective):
    data = batch([[1.0, 0.0, 0.1], [0.0, 0.2]], [[1.0, -1.0, 1.0], [-1.0, 1.0]])
    interface = DecoupledPPOActorInterface(rejection=RatioRange(cap=1.5), objective=objective)
    grad_T = gradient(interface, data, data["prox_logprobs"] + 0.05)
    assert grad_T.bool().tolist() == [False, False, True, True, False, True, True]


@pytest.mark.parametrize("denominator", Denominator)
def test_trap_f5_a_batch_that_is_rejected_whole_makes_no_update(denominator):
    data = random_batch(0)
    interface = DecoupledPPOActorInterface(rejection=RatioRange(cap=1e-6), denominator=denominator)
    trained = train_once(interface, data, MicroBatchSpec())
    for p, q in zip(trained.parameters, BigramEngine().parameters, strict=True):
        assert torch.equal(p, q)
    assert trained.metrics["behaviour_rejected_fraction"] == 1


def test_trap_f6_a_response_has_one_weight_in_a_packed_batch():
    data = random_batch(3)
    for level in (SEQUENCE, GEOMETRIC):
        corrected = DecoupledPPOActorInterface(behaviour_weight=RatioRange(level)).corrected(data)
        keys = ("loss_mask", "logprobs", "prox_logprobs", "advantages")
        for mask, behaviour, proximal, gain, weighted in zip(
            *(data.sequences(k) for k in keys), corrected.sequences("advantages"), strict=True
        ):
            want = ratios((proximal - behaviour)[mask].tolist(), level)
            assert (weighted / gain)[mask].tolist() == pytest.approx(want, rel=1e-9)


# ratio, advantage, loss per unit of weight (clip 0.2 below, 0.3 above, dual clip at 3)
TABLE = [(1.2, 2.0, -2.4), (1.5, 2.0, -2.6), (0.5, 2.0, -1.0), (0.5, -2.0, 1.6), (2.9, -2.0, 5.8), (3.5, -2.0, 6.0)]


@pytest.mark.parametrize(("ratio", "advantage", "loss"), TABLE)
def test_trap_f9_the_clip_is_around_the_proximal_policy_and_the_weight_multiplies_what_is_left(ratio, advantage, loss):
    data = batch([[math.log(0.5)]], [[advantage]])
    interface = DecoupledPPOActorInterface(clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    output = Output(data["prox_logprobs"] + math.log(ratio))
    total, stats = interface.loss(output, data)
    assert total.item() == pytest.approx(0.5 * loss)
    assert stat_values(stats)["dual_clip_fraction"] == float(ratio == 3.5)


@pytest.mark.parametrize("level", ImportanceLevel)
def test_trap_f10_with_the_sampler_as_proximal_policy_it_is_ppo(level):
    data = random_batch(4)
    data = data.select(["input_ids", "loss_mask", "logprobs", "rewards", "ref_logprobs"])
    kl = KLPenalty(KLPlace.loss, 0.1, KLEstimator.k3)
    settings = {"epochs": 2, "n_minibatches": 2, "kl": kl, "entropy_coef": 0.1, "dual_clip": 3.0}
    plain = train_once(PPOActorInterface(**settings), data, MicroBatchSpec())
    bounds = {"behaviour_weight": RatioRange(level, 0.5, 2.0), "rejection": RatioRange(level, 0.5, 2.0)}
    same = data.with_tokens(prox_logprobs=data["logprobs"])
    decoupled = train_once(DecoupledPPOActorInterface(**settings, **bounds), same, MicroBatchSpec())
    for p, q in zip(plain.parameters, decoupled.parameters, strict=True):
        assert torch.equal(p, q)
    assert decoupled.metrics["behaviour_weight_mean"] == 1
    assert {k: decoupled.metrics[k] for k in plain.metrics} == plain.metrics


@pytest.mark.parametrize("seed", range(3))
def test_what_is_rejected_does_not_depend_on_how_the_batch_is_cut(seed):
    interface = DecoupledPPOActorInterface(
        behaviour_weight=RatioRange(TOKEN, 0.9, 1.1), rejection=RatioRange(SEQUENCE, 0.8, 1.2), n_minibatches=2
    )
    inputs = next(r for r in dataflow(kl=True).rpcs if r.name == "actor_train").inputs
    check_train_step(interface, inputs, seed=seed)


def test_staleness_is_that_of_the_oldest_and_of_the_newest_token_of_a_response():
    data = random_batch(0).select(["input_ids", "loss_mask", "logprobs", "prox_logprobs", "rewards", "versions"])
    ages = [(5, 3, 3), (2,), ()]
    part = SequenceSample.from_sequences(["q"], {"input_ids": [[[1, *range(len(x))] for x in ages]]}).with_tokens(
        versions=torch.tensor([x for age in ages for x in (-1, *(7 - a for a in age))], dtype=torch.int32)
    )
    part = part.with_tokens(
        loss_mask=part["versions"] >= 0, logprobs=torch.zeros(7), prox_logprobs=torch.zeros(7)
    ).with_sequences(rewards=torch.tensor([1.0, 0.0, 0.0]))
    interface = DecoupledPPOActorInterface()
    stats = stat_values(interface.train_step(Model("actor", BigramEngine(), version=7), part, MicroBatchSpec()))
    assert (stats["staleness_head"], stats["staleness_tail"], stats["staleness_max"]) == (3.5, 2.5, 5.0)
    fresh = train_once(interface, data, MicroBatchSpec()).metrics
    assert (fresh["staleness_head"], fresh["staleness_tail"], fresh["staleness_max"]) == (0.0, 0.0, 0.0)
    unknown = train_once(interface, data.select(data.keys - {"versions"}), MicroBatchSpec()).metrics
    assert not [k for k in unknown if "staleness" in k]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"denominator": Denominator.all}, "denominator=all has no effect"),
        ({"rejection": RatioRange(SEQUENCE)}, "rejection.level=sequence has no effect"),
        (
            {"denominator": Denominator.all, "rejection": RatioRange(cap=2.0), "entropy_coef": 0.1},
            "would still train on them",
        ),
        (
            {
                "denominator": Denominator.all,
                "rejection": RatioRange(cap=2.0),
                "kl": KLPenalty(KLPlace.loss, 0.1, KLEstimator.k3),
            },
            "would still train on them",
        ),
        *(
            (
                {"denominator": Denominator.all, "rejection": RatioRange(cap=2.0), "objective": objective},
                f"the mean that objective={objective.value} takes",
            )
            for objective in (PolicyObjective.gspo, PolicyObjective.gmpo)
        ),
    ],
)
def test_settings_without_effect_or_with_two_meanings_are_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        DecoupledPPOActorInterface(**settings)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"cap": 0.0}, "cap must be positive, or null, found 0"),
        ({"cap": math.nan}, "cap must be positive"),
        ({"floor": 0.0}, "floor must be above 0 and at most cap=None, or null, found 0"),
        ({"floor": 3.0, "cap": 2.0}, "floor must be above 0 and at most cap=2.0, or null, found 3"),
    ],
)
def test_a_range_that_holds_nothing_is_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        RatioRange(**settings)


def test_the_launch_table_says_what_is_bounded():
    plain = DecoupledPPOActorInterface().describe(4)
    assert plain["behaviour weight"] == "token ratio, unbounded"
    assert "kept in the loss" not in plain
    both = DecoupledPPOActorInterface(
        behaviour_weight=RatioRange(TOKEN, 0.5, 5.0), rejection=RatioRange(GEOMETRIC, 0.9)
    )
    assert both.describe(4)["behaviour weight"] == "token ratio in [0.5, 5]"
    assert both.describe(4)["kept in the loss"] == "geometric ratio in [0.9, inf]; divided by kept"


def test_the_graph_scores_what_was_sampled_before_it_trains():
    order = [r.name for r in dataflow().order]
    assert order.index("actor_gen") < order.index("actor_inf") < order.index("actor_train")
    train = next(r for r in dataflow(kl=True).rpcs if r.name == "actor_train")
    assert {"logprobs", "prox_logprobs", "versions", "ref_logprobs"} <= set(train.inputs)


def test_with_rewards_normalised_in_groups_it_takes_the_credit_of_grpo():
    data = random_batch(5).select(["input_ids", "loss_mask", "logprobs", "rewards"])
    in_groups = Normalization(Scope.group, Scope.group)
    sampler = GenerationConfig(n=4)
    decoupled = DecoupledPPOActorInterface(generation=sampler, lam=1.0, reward_norm=in_groups, adv_norm=RAW)
    grpo = GRPOActorInterface(adv_norm=in_groups, min_group_size=1)
    model = Model("actor", BigramEngine())
    found, want = (x.compute_advantages(model, x.prepare(model, data)) for x in (decoupled, grpo))
    torch.testing.assert_close(found["advantages"], want["advantages"], rtol=0, atol=1e-6)
    assert want["advantages"].any()


def learn(interface: DecoupledPPOActorInterface, *, staleness: int, shuffle: bool, steps: int = 16) -> list[float]:
    """Mean reward (the share of token 3) of each step, of responses that a policy `staleness` steps old sampled."""
    engine = BigramEngine(lr=4.0)
    model = Model("actor", engine)
    older = deque([deepcopy(engine)], maxlen=staleness + 1)
    rng = np.random.default_rng(0)
    prompts = SequenceSample.from_sequences(range(8), {"prompt_ids": [[[1, 2 + i]] for i in range(8)]})
    history = []
    for step in range(steps):
        behind = Model("actor", older[0], version=step)
        data = interface.generate(behind, prompts, MicroBatchSpec())
        rewards = torch.tensor(
            [
                float((x == 3)[m].float().mean())
                for x, m in zip(data.sequences("input_ids"), data.sequences("loss_mask"), strict=True)
            ]
        )
        history.append(float(rewards.mean()))
        if shuffle:
            rewards = rewards[torch.from_numpy(rng.permutation(len(rewards)))]
        scored = interface.inference(model, data, MicroBatchSpec())
        data = data.with_tokens(prox_logprobs=scored["logprobs"]).with_sequences(rewards=rewards)
        interface.train_step(model, data, MicroBatchSpec())
        model.advance()
        older.append(deepcopy(engine))
    return history


@pytest.mark.parametrize("bounds", [{}, {"rejection": RatioRange(cap=2.0)}])
def test_trap_g9_it_learns_from_an_older_policy_and_not_from_shuffled_rewards(bounds):
    interface = DecoupledPPOActorInterface(
        generation=GenerationConfig(n=8, max_new_tokens=6, fixed_length=True),
        lam=1.0,
        epochs=2,
        n_minibatches=2,
        **bounds,
    )
    rewards = learn(interface, staleness=4, shuffle=False)
    shuffled = learn(interface, staleness=4, shuffle=True)
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2
    assert abs(np.mean(shuffled[-5:]) - np.mean(shuffled[:5])) < 0.05

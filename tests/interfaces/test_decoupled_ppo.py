from __future__ import annotations

import math
from collections import deque
from copy import deepcopy

import numpy as np
import pytest
import torch

from realign.api import (
    GenerationConfig,
    MicroBatchSpec,
    Model,
    SequenceSample,
    stat_values,
)
from realign.functional import ImportanceLevel
from realign.interfaces.components import (
    GAE,
    Clip,
    EntropyBonus,
    ImportanceCorrection,
    KLPenalty,
    KLPlace,
    RatioRange,
    SeqMeanTokenMean,
    SeqMeanTokenSum,
    TokenMean,
)
from realign.interfaces.decoupled_ppo import DecoupledPPOActorInterface
from realign.interfaces.ppo import PPOActorInterface
from realign.testing import BigramEngine, random_batch, train_once
from tests.grids import rotating

TOKEN, SEQUENCE, GEOMETRIC = ImportanceLevel.token, ImportanceLevel.sequence, ImportanceLevel.geometric


def decoupled(weight=None, rejection=None, keep_in_divisor=False, **settings) -> DecoupledPPOActorInterface:
    """Build decoupled PPO with these ranges."""
    correction = ImportanceCorrection(weight or RatioRange(), rejection, keep_in_divisor)
    return DecoupledPPOActorInterface(correction=correction, **settings)


def token_values(rows: list[list[float]]) -> torch.Tensor:
    """Return [T] values of the sampled tokens of each sequence, with 0 for its prompt token."""
    return torch.tensor([x for row in rows for x in (0.0, *row)], dtype=torch.float64)


def batch(log_weights: list[list[float]], advantages: list[list[float]] | None = None) -> SequenceSample:
    """Return sequences of a prompt token and sampled tokens with these log-ratios of proximal to behavior policy."""
    data = SequenceSample.from_sequences(["q"], {"input_ids": [[[1, *range(2, 2 + len(x))] for x in log_weights]]})
    sampled = torch.cat([torch.arange(1 + len(x)) > 0 for x in log_weights])
    behavior = torch.full((len(sampled),), -2.0, dtype=torch.float64)
    gains = advantages or [[1.0] * len(x) for x in log_weights]
    return data.with_tokens(
        loss_mask=sampled,
        logprobs=behavior,
        prox_logprobs=behavior + token_values(log_weights),
        advantages=token_values(gains),
    )


class Output:
    """Model output with log-probs as leaf tensors, to inspect the gradient of each token."""

    def __init__(self, logprobs_T: torch.Tensor) -> None:
        self.logprobs_T = logprobs_T.clone().requires_grad_()

    def logprobs_and_entropy(self, *, temperature=1.0, where_T=None):
        return torch.where(where_T, self.logprobs_T, 0), torch.zeros_like(self.logprobs_T)


def gradient(interface: PPOActorInterface, data: SequenceSample, logprobs_T: torch.Tensor) -> torch.Tensor:
    """Return [T] the gradient of the divided loss with respect to the log-probs."""
    output = Output(logprobs_T)
    (interface.loss(output, data)[0] / interface.loss_weight(data)).backward()
    return output.logprobs_T.grad


# Independent reference: one sequence and one token at a time.


def ratios(log_ratios: list[float], level: ImportanceLevel) -> list[float]:
    n = len(log_ratios)
    if level is TOKEN:
        return [math.exp(x) for x in log_ratios]
    total = sum(log_ratios) / (max(n, 1) if level is GEOMETRIC else 1)
    return [math.exp(total)] * n


def reference(interface: DecoupledPPOActorInterface, data: SequenceSample, table: np.ndarray):
    """Return the loss, and its gradient with respect to the table of logits."""
    correction, clip = interface.correction, interface.objective
    w, r = correction.weight, correction.rejection or RatioRange()
    loss, divisor, grad = 0.0, 0.0, np.zeros_like(table)
    keys = ("input_ids", "loss_mask", "logprobs", "prox_logprobs", "advantages")
    for ids, mask, behavior, proximal, advantage in zip(*(data.sequences(k) for k in keys), strict=True):
        where = [t for t in range(len(ids)) if mask[t]]
        log_ratios = [float(proximal[t] - behavior[t]) for t in where]
        weights = [min(max(x, w.floor or 0), w.cap or math.inf) for x in ratios(log_ratios, w.level)]
        keep = [(r.floor or 0) <= x <= (r.cap or math.inf) for x in ratios(log_ratios, r.level)]
        counted = len(where) if correction.keep_in_divisor else sum(keep)
        if not counted:
            continue
        per_token = interface.aggregation == TokenMean()
        divisor += counted if per_token else 1
        share = 1 / counted if interface.aggregation == SeqMeanTokenMean() else 1
        for t, weight, kept in zip(where, weights, keep, strict=True):
            if not kept:
                continue
            before, token, a = int(ids[t - 1]), int(ids[t]), float(advantage[t])
            logp = table[before] - np.log(np.exp(table[before]).sum())
            ratio = math.exp(logp[token] - float(proximal[t]))
            held = min(max(ratio, 1 - clip.low), 1 + clip.high)
            value, slope = max((-a * ratio, -a * ratio), (-a * held, 0.0), key=lambda pair: pair[0])
            if clip.dual and a < 0 and value > -a * clip.dual:
                value, slope = -a * clip.dual, 0.0
            loss += share * weight * value
            grad[before] += share * weight * slope * (np.eye(len(table))[token] - np.exp(logp))
    return loss / divisor, grad / divisor


RANGES = [
    (level, *ends) for level in ImportanceLevel for ends in ((None, None), (None, 1.05), (0.95, None), (0.9, 1.1))
]
REJECTIONS = [None, *(RatioRange(*x) for x in RANGES if x[1:] != (None, None))]


@pytest.mark.parametrize(
    ("rejecting", "aggregation"),
    rotating(
        [(rejection, keep) for rejection in REJECTIONS for keep in (False, True) if rejection or not keep],
        [TokenMean(), SeqMeanTokenMean(), SeqMeanTokenSum()],
    ),
    ids=str,
)
def test_loss_and_gradient_agree_with_a_plain_reference(rejecting, aggregation):
    data, (rejection, keep_in_divisor) = random_batch(2), rejecting
    for weight in RANGES:
        interface = decoupled(
            RatioRange(*weight), rejection, keep_in_divisor, aggregation=aggregation, objective=Clip(low=0.1, dual=1.5)
        )
        engine = BigramEngine(seed=4, lr=1.0)
        before = engine.logits_VV.clone().numpy()
        spec = MicroBatchSpec(n_microbatches=3)
        stats = stat_values(engine.train_batch(data, spec, interface.loss, interface.loss_weight))
        loss, grad = reference(interface, data, before)
        assert stats["loss"] == pytest.approx(loss, abs=1e-9)
        np.testing.assert_allclose(before - engine.logits_VV.numpy(), grad, rtol=0, atol=1e-9)


def test_trap_f1_the_behavior_weight_is_a_constant():
    data = random_batch(1)
    logprobs_T = data["prox_logprobs"] + 0.05
    leaves = {k: data[k].clone().requires_grad_() for k in ("prox_logprobs", "logprobs")}
    grad_T = gradient(DecoupledPPOActorInterface(), data.with_tokens(**leaves), logprobs_T)
    assert all(leaf.grad is None for leaf in leaves.values())
    plain_T = gradient(PPOActorInterface(), data, logprobs_T)
    weight_T = (data["prox_logprobs"] - data["logprobs"]).exp()
    torch.testing.assert_close(grad_T, weight_T * plain_T, rtol=1e-12, atol=0)
    assert plain_T.any()


def test_trap_f2_what_is_rejected_leaves_the_divisor_unless_it_is_asked_to_stay():
    data = batch([[0.0, 2.0, -1.0], [0.0, 3.0, 3.0]])
    cap = RatioRange(cap=2.0)
    kept, truncated, everything = decoupled(rejection=cap), decoupled(cap), decoupled(None, cap, True)
    assert [float(x.loss_weight(data)) for x in (kept, truncated, everything)] == [3, 6, 6]
    now_T = data["prox_logprobs"]  # at ratio 1, the gradient of a token is minus its weight, divided
    e = math.exp(-1)
    assert gradient(kept, data, now_T).tolist() == pytest.approx([0, -1 / 3, 0, -e / 3, 0, -1 / 3, 0, 0])
    assert gradient(everything, data, now_T).tolist() == pytest.approx([0, -1 / 6, 0, -e / 6, 0, -1 / 6, 0, 0])
    assert gradient(truncated, data, now_T).tolist() == pytest.approx(
        [0, -1 / 6, -2 / 6, -e / 6, 0, -1 / 6, -2 / 6, -2 / 6]
    )


def test_trap_f3_metrics_of_the_weights_exist_where_both_policies_are_known_and_only_there():
    data = random_batch(1)
    assert not [k for k in train_once(PPOActorInterface(), data, MicroBatchSpec()).metrics if "behavior" in k]
    interface, model = decoupled(RatioRange(cap=1.1), RatioRange(SEQUENCE, cap=1.05)), Model("actor", BigramEngine())
    assert interface.keys("train_step").needs["prox_logprobs"] == "correction"
    assert "versions" in interface.keys("train_step").uses
    assert "prox_logprobs" not in interface.keys("generate").needs
    metrics = stat_values(interface.batch_stats(model, data))
    ratio, truncated, rejected, kept = [], 0, 0, []
    for mask, behavior, proximal in zip(
        *(data.sequences(k) for k in ("loss_mask", "logprobs", "prox_logprobs")), strict=True
    ):
        mine = ratios((proximal - behavior)[mask].tolist(), TOKEN)
        out = math.prod(mine) > 1.05
        ratio += mine
        truncated += 0 if out else sum(x > 1.1 for x in mine)
        rejected += len(mine) * out
        kept += [] if out else [min(x, 1.1) for x in mine]
    want = {
        "behavior_kl": np.mean([x - 1 - math.log(x) for x in ratio]),
        "behavior_weight_mean": np.mean(kept),
        "behavior_weight_max": max(kept),
        "behavior_clamped_fraction": 0.0,
        "behavior_truncated_fraction": truncated / len(kept),
        "behavior_rejected_fraction": rejected / len(ratio),
    }
    assert 0 < want["behavior_truncated_fraction"] < 1
    assert 0 < want["behavior_rejected_fraction"] < 1
    assert {k: metrics[k] for k in want} == pytest.approx(want, rel=1e-5)
    assert "behavior_rejected_fraction" not in stat_values(decoupled().batch_stats(model, data))


def test_trap_f4_a_response_is_rejected_as_a_whole_whatever_its_tokens_say():
    """The ratio and the advantage of the second token are harmless, but its response is rejected."""
    data = batch([[0.5, -0.25, 0.75], [0.1, -0.2]], [[-0.5, 0.25, -0.25], [1.0, 1.0]])
    for level, cap in ((SEQUENCE, 1.5), (GEOMETRIC, 1.2)):
        interface = decoupled(rejection=RatioRange(level, cap=cap))
        assert interface.correction.correct(data).mask_T.tolist() == [False] * 5 + [True] * 2
        assert float(interface.loss_weight(data)) == 2
    token = ImportanceCorrection(rejection=RatioRange(TOKEN, cap=1.5))
    assert token.correct(data).mask_T.tolist() == [False, False, True, False, False, True, True]


@pytest.mark.parametrize("keep_in_divisor", [False, True])
@pytest.mark.parametrize("level", ImportanceLevel)
def test_trap_f5_what_is_rejected_has_no_gradient(level, keep_in_divisor):
    data = batch([[1.0, 1.0], [0.0, 0.0]])
    interface = decoupled(None, RatioRange(level, cap=1.5), keep_in_divisor)
    grad_T = gradient(interface, data, data["prox_logprobs"] + 0.1)
    assert not grad_T[:3].any()
    assert grad_T[4:].all()


# Columns: ratio, advantage, loss per unit of weight (clip 0.2 below, 0.3 above, dual clip at 3).
TABLE = [(1.2, 2.0, -2.4), (1.5, 2.0, -2.6), (0.5, 2.0, -1.0), (0.5, -2.0, 1.6), (2.9, -2.0, 5.8), (3.5, -2.0, 6.0)]


@pytest.mark.parametrize(("ratio", "advantage", "loss"), TABLE)
def test_trap_f9_the_clip_is_around_the_proximal_policy_and_the_weight_multiplies_what_is_left(ratio, advantage, loss):
    data = batch([[math.log(0.5)]], [[advantage]])
    interface = decoupled(objective=Clip(0.2, 0.3, dual=3.0))
    output = Output(data["prox_logprobs"] + math.log(ratio))
    total, stats = interface.loss(output, data)
    assert total.item() == pytest.approx(0.5 * loss)
    assert stat_values(stats)["dual_clip_fraction"] == float(ratio == 3.5)


@pytest.mark.parametrize("level", ImportanceLevel)
def test_trap_f10_with_the_sampler_as_proximal_policy_it_is_ppo(level):
    data = random_batch(4)
    data = data.select(["input_ids", "loss_mask", "logprobs", "rewards", "ref_logprobs"])
    kl = KLPenalty(KLPlace.loss, 0.1)
    settings = {"epochs": 2, "n_minibatches": 2, "kl": kl, "entropy": EntropyBonus(0.1), "objective": Clip(dual=3.0)}
    plain = train_once(PPOActorInterface(**settings), data, MicroBatchSpec())
    bounds = RatioRange(level, 0.5, 2.0), RatioRange(level, 0.5, 2.0)
    same = data.with_tokens(prox_logprobs=data["logprobs"])
    corrected = train_once(decoupled(*bounds, **settings), same, MicroBatchSpec())
    for p, q in zip(plain.parameters, corrected.parameters, strict=True):
        assert torch.equal(p, q)
    assert corrected.metrics["behavior_weight_mean"] == 1
    assert {k: corrected.metrics[k] for k in plain.metrics} == plain.metrics


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


def learn(interface: DecoupledPPOActorInterface, *, staleness: int, shuffle: bool, steps: int = 16) -> list[float]:
    """Train on responses of a policy that is `staleness` steps old. Return the mean reward (fraction of token 3) per
    step."""
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
        model.publish_weights()
        older.append(deepcopy(engine))
    return history


def test_trap_g9_it_learns_from_an_older_policy_and_not_from_shuffled_rewards():
    interface = decoupled(
        generation=GenerationConfig(n=8, max_new_tokens=6, fixed_length=True),
        advantage=GAE(lam=1.0),
        epochs=2,
        n_minibatches=2,
        rejection=RatioRange(cap=2.0),
    )
    rewards = learn(interface, staleness=4, shuffle=False)
    shuffled = learn(interface, staleness=4, shuffle=True)
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2
    assert abs(np.mean(shuffled[-5:]) - np.mean(shuffled[:5])) < 0.05

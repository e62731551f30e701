from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from realign.api import MicroBatchSpec, Model, SequenceSample, stat_values
from realign.interfaces.components import Normalization, ProximalKL
from realign.interfaces.ppo import PPOActorInterface
from realign.testing import BigramEngine, random_batch

KEYS = ["input_ids", "loss_mask", "logprobs", "rewards"]
STEPS = {"epochs": 2, "n_minibatches": 2}


def sampled_now(engine: BigramEngine, seed: int = 2) -> SequenceSample:
    """Return a batch whose old log-probs are those of the engine."""
    data = random_batch(seed).select(KEYS)
    table = engine.logits_VV.log_softmax(-1)
    ids_T = data["input_ids"]
    logprobs_T = torch.where(data["loss_mask"], table[ids_T.roll(1), ids_T], 0)
    return data.with_tokens(logprobs=logprobs_T)


def rows_of(data: SequenceSample) -> list[tuple[int, int, float]]:
    """Return previous token, token and old log-prob of every token that trains."""
    rows = []
    for ids, mask, old, reward in zip(
        *(data.sequences(key) for key in ("input_ids", "loss_mask", "logprobs")), data["rewards"].tolist(), strict=True
    ):
        if math.isfinite(reward):
            rows += [(int(ids[t - 1]), int(ids[t]), float(old[t])) for t in np.flatnonzero(mask.numpy())]
    return rows


def kl_of(table: torch.Tensor, data: SequenceSample) -> float:
    """Return the k3 estimate of KL(old, current), token by token."""
    logp = table.log_softmax(-1)
    moves = [float(logp[before, token]) - old for before, token, old in rows_of(data)]
    return float(np.mean([math.exp(move) - 1 - move for move in moves]))


@pytest.mark.parametrize(("target", "factor"), [(1e-9, 2.0), (1e9, 0.5)])
def test_the_coefficient_follows_the_kl_after_the_update(target, factor):
    engine = BigramEngine(lr=1.0)
    data = sampled_now(engine)
    interface = PPOActorInterface(objective=ProximalKL(0.25, target), **STEPS)
    stats = stat_values(interface.train_step(Model("actor", engine), data, MicroBatchSpec(n_microbatches=2)))
    want = kl_of(engine.logits_VV, data)
    assert want > 1e-6
    assert stats["proximal_kl"] == pytest.approx(want, rel=1e-4)
    assert stats["proximal_kl_coef"] == 0.25
    assert interface.objective_control.coef == 0.25 * factor


def test_the_step_equals_a_plain_reference():
    data = random_batch(3).select(KEYS)
    engine = BigramEngine(seed=5, lr=1.0)
    before = engine.logits_VV.clone().numpy()
    interface = PPOActorInterface(objective=ProximalKL(0.7), adv_norm=Normalization("none", "none"))
    credited = interface.credit(Model("actor", engine), data, MicroBatchSpec())
    advantages = credited["advantages"][credited["loss_mask"]].tolist()
    interface.train_step(Model("actor", engine), data, MicroBatchSpec(n_microbatches=3))
    rows, gradient = rows_of(data), np.zeros_like(before)
    for (previous, token, old), a in zip(rows, advantages, strict=True):
        logp = before[previous] - np.log(np.exp(before[previous]).sum())
        ratio = math.exp(logp[token] - old)
        slope = -a * ratio + 0.7 * (ratio - 1)
        gradient[previous] += slope * (np.eye(len(before))[token] - np.exp(logp)) / len(rows)
    np.testing.assert_allclose(before - engine.logits_VV.numpy(), gradient, rtol=0, atol=1e-7)


def test_a_resumed_run_continues_with_the_same_coefficient_and_weights():
    def train(interface: PPOActorInterface, engine: BigramEngine, steps: range) -> None:
        for version in steps:
            data = sampled_now(engine, seed=version)
            interface.train_step(Model("actor", engine, version=version), data, MicroBatchSpec())

    def made() -> PPOActorInterface:
        return PPOActorInterface(objective=ProximalKL(0.3, 1e-9), **STEPS)

    whole, engine = made(), BigramEngine(lr=1.0)
    train(whole, engine, range(1, 3))
    saved, weights = json.loads(json.dumps(whole.state_dict()["objective"])), engine.logits_VV.clone()
    train(whole, engine, range(3, 5))
    resumed, again = made(), BigramEngine(lr=1.0)
    resumed.load_state_dict(made().state_dict() | {"objective": saved})
    again.logits_VV.copy_(weights)
    train(resumed, again, range(3, 5))
    assert resumed.objective_control.coef == whole.objective_control.coef == 0.3 * 2**4
    assert torch.equal(again.logits_VV, engine.logits_VV)

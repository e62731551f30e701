"""Test the entropy bonus: its gradient, the rule of its coefficient, and its state."""

from __future__ import annotations

import pytest
import torch

from realign.api import Mean, MicroBatchSpec, Model, stat_values
from realign.functional import identity
from realign.interfaces.components import EntropyBonus
from realign.interfaces.grpo import GRPOActorInterface
from realign.testing import BigramEngine, random_batch, train_once

KEYS = ["input_ids", "loss_mask", "logprobs", "rewards"]


def measured(entropy: float, tokens: float = 4.0) -> dict[str, Mean]:
    return {"entropy": Mean(torch.tensor(entropy * tokens), torch.tensor(tokens))}


def test_the_coefficient_rises_below_the_target_falls_above_it_and_applies_only_below():
    control = EntropyBonus(coef=0.02, target=1.0, delta=0.01, limit=0.035).control()
    assert control.coef == 0.02  # nothing is measured yet
    history = []
    for entropy in (0.5, 1.0, 0.9, 1.1, 2.0, 1.5, 1.2, 1.3, 0.4):  # the target itself counts as below
        control.update(measured(entropy), identity)
        history.append((round(control.value, 6), round(control.coef, 6)))
    assert history == [
        (0.03, 0.03),
        (0.035, 0.035),  # the limit
        (0.035, 0.035),
        (0.025, 0),
        (0.015, 0),
        (0.005, 0),
        (0, 0),
        (0, 0),
        (0.01, 0.01),
    ]


def test_the_metric_is_the_coefficient_that_applied_and_the_entropy_that_of_all_ranks():
    control = EntropyBonus(coef=0.1, target=1.0).control()
    doubled = control.update(measured(0.8), lambda x: x * torch.tensor([3.0, 2.0]))  # 1.2 over both ranks
    assert stat_values(doubled) == {"entropy_coef": pytest.approx(0.1)}
    assert (control.entropy, control.coef) == (pytest.approx(1.2), 0.0)
    for nothing in ({}, measured(0.0, 0.0), measured(float("nan"))):
        control.update(nothing, identity)
    assert control.entropy == pytest.approx(1.2)


def test_a_checkpoint_continues_the_coefficient():
    actor = GRPOActorInterface(entropy=EntropyBonus(target=1.0))
    actor.entropy_control.update(measured(0.1), identity)
    other = GRPOActorInterface(entropy=EntropyBonus(target=1.0))
    other.load_state_dict(actor.state_dict())
    assert other.entropy_control.state_dict() == {"value": 0.005, "entropy": pytest.approx(0.1)}
    assert other.targets() == {"entropy": 1.0}


def test_the_bonus_is_the_entropy_of_trained_tokens_and_moves_the_weights_along_its_gradient():
    data = random_batch(2).select(KEYS)
    plain, with_bonus = (
        train_once(GRPOActorInterface(entropy=EntropyBonus(coef)), data, MicroBatchSpec()) for coef in (0.0, 0.3)
    )
    engine = BigramEngine(seed=0)
    logits_VV = engine.logits_VV.clone().requires_grad_()
    before_T = data["input_ids"].roll(1)
    probs_VV = logits_VV.softmax(-1)
    entropy_V = -(probs_VV * probs_VV.log()).sum(-1)
    # only responses of groups with two rewards train
    actor = GRPOActorInterface()
    mask_T = actor.with_advantages(Model("actor", engine), data)["loss_mask"]
    (entropy_V[before_T][mask_T].sum() / mask_T.sum()).backward()
    step = with_bonus.parameters[0] - plain.parameters[0]
    torch.testing.assert_close(step, 0.3 * engine.lr * logits_VV.grad, rtol=1e-6, atol=1e-9)

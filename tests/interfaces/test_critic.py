from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from realign.api import MicroBatchSpec, Model, SequenceSample, stat_values
from realign.interfaces.components import ValueObjective
from realign.interfaces.components.value_loss import ValueLoss
from realign.interfaces.critic import PPOCriticInterface, ValueNormalization, ValueScale
from realign.testing import BigramEngine, random_batch

KEYS = ["input_ids", "loss_mask", "values", "returns"]


def step(interface: PPOCriticInterface, data: SequenceSample, *, seed: int = 5) -> tuple[np.ndarray, dict[str, float]]:
    """Return the gradient of the value table in one training step, and the metrics of the step."""
    engine = BigramEngine(seed=seed, lr=1.0)
    before = engine.values_V.clone()
    stats = interface.train_step(Model("critic", engine), data, MicroBatchSpec(n_microbatches=3))
    return (before - engine.values_V).numpy(), stat_values(stats)


def reference(
    data: SequenceSample, table: np.ndarray, objective: ValueObjective, by_sequence: bool = False
) -> np.ndarray:
    """Compute the gradient of the mean value loss from its definition, token by token.

    With `by_sequence`, it is the mean of the means of the sequences, and each sequence has the same weight.
    """
    gradient, total = np.zeros_like(table), 0.0
    for ids, mask, old, target in zip(*(data.sequences(k) for k in KEYS), strict=True):
        tokens = np.flatnonzero(mask.numpy())
        weight = 1 / len(tokens) if by_sequence and len(tokens) else 1.0
        total += weight * len(tokens)
        for t in tokens:
            v, old_v, r = float(table[ids[t - 1]]), float(old[t]), float(target[t])
            held = v if objective.clip is None else min(max(v, old_v - objective.clip), old_v + objective.clip)

            def error(x: float) -> float:
                if objective.kind is ValueLoss.mse or abs(x) <= objective.huber_delta:
                    return x * x / 2
                return objective.huber_delta * (abs(x) - objective.huber_delta / 2)

            if error(held - r) > error(v - r):
                continue  # the clipped branch has no gradient
            slope = v - r
            if objective.kind is ValueLoss.huber:
                slope = float(np.clip(slope, -objective.huber_delta, objective.huber_delta))
            gradient[ids[t - 1]] += weight * slope
    return gradient / total


@pytest.mark.parametrize(
    "objective",
    [
        ValueObjective(clip=None),
        ValueObjective(clip=0.2),
        ValueObjective(clip=0.5, kind=ValueLoss.huber, huber_delta=0.7),
    ],
    ids=str,
)
def test_the_step_equals_a_plain_reference(objective):
    data = random_batch(3).select(KEYS)
    got, _ = step(PPOCriticInterface(objective=objective), data)
    want = reference(data, BigramEngine(seed=5).values_V.numpy(), objective)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-9)


def test_trap_c15_neither_prompt_tokens_nor_their_number_reach_the_critic():
    data = random_batch(2).select(KEYS)
    other = data.with_tokens(
        returns=torch.where(data["loss_mask"], data["returns"], 1e6),
        values=torch.where(data["loss_mask"], data["values"], math.nan),
    )
    first, _ = step(PPOCriticInterface(), data)
    second, _ = step(PPOCriticInterface(), other)
    assert np.array_equal(first, second)


def test_values_are_those_of_the_state_before_a_token_and_bootstrap_that_after_the_last():
    engine = BigramEngine()
    data = SequenceSample.from_sequences(["q"], {"input_ids": [[[1, 2, 3, 4]]]})
    data = data.with_tokens(loss_mask=torch.tensor([False, False, True, True]))
    out = PPOCriticInterface().inference(Model("critic", engine), data, MicroBatchSpec())
    v = engine.values_V
    assert out.keys == {"values", "bootstrap_values"}
    assert out["values"].tolist() == [0, 0, float(v[2]), float(v[3])]
    assert out["bootstrap_values"].tolist() == [float(v[4])]


@pytest.mark.parametrize("scale", [ValueScale.exponential, ValueScale.cumulative])
def test_normalization_is_the_identity_before_the_first_update_and_then_that_of_the_returns(scale):
    interface = PPOCriticInterface(normalization=ValueNormalization(scale, eps=0.0))
    plain = PPOCriticInterface()
    engine = BigramEngine()
    data = random_batch(1).select(KEYS)
    model = Model("critic", engine)
    ask = data.select(["input_ids", "loss_mask"])
    before = interface.inference(model, ask, MicroBatchSpec())
    assert torch.equal(before["values"], plain.inference(model, ask, MicroBatchSpec())["values"])
    interface.train_step(model, data, MicroBatchSpec())
    returns = data["returns"][data["loss_mask"]].numpy()
    # Moments of a single batch: exponential moments use the population std, moments of all values the sample std.
    std = returns.std(ddof=0 if scale is ValueScale.exponential else 1)
    raw = plain.inference(model, ask, MicroBatchSpec())
    got = interface.inference(model, ask, MicroBatchSpec())
    mask = ask["loss_mask"]
    np.testing.assert_allclose(got["values"][mask], raw["values"][mask] * std + returns.mean(), rtol=0, atol=1e-6)
    np.testing.assert_allclose(
        got["bootstrap_values"], raw["bootstrap_values"] * std + returns.mean(), rtol=0, atol=1e-6
    )


def test_with_normalization_targets_are_normalized_returns_and_old_values_are_the_outputs_of_then():
    """The clip compares an output with the output at sampling time, in the same units."""
    data = random_batch(3).select(["input_ids", "loss_mask", "returns"])
    engine, model_engine = BigramEngine(seed=5), BigramEngine(seed=5, lr=1.0)
    interface = PPOCriticInterface(normalization=ValueNormalization(ValueScale.exponential, beta=0.5, eps=0.0))
    # The moments contain values of an earlier step.
    interface.moments.update(torch.tensor([3.0, 7.0]), torch.tensor([True, True]), lambda x: x)
    model = Model("critic", model_engine)
    data = data.merge(interface.inference(model, data.select(["input_ids", "loss_mask"]), MicroBatchSpec()))
    interface.train_step(model, data.select(KEYS), MicroBatchSpec())
    mask = data["loss_mask"]
    moments = interface.moments
    outputs = PPOCriticInterface().inference(
        Model("critic", engine), data.select(["input_ids", "loss_mask"]), MicroBatchSpec()
    )
    normal = data.with_tokens(
        values=outputs["values"], returns=torch.where(mask, (data["returns"] - moments.mean) / moments.std, 0)
    )
    want = reference(normal, engine.values_V.numpy(), ValueObjective())
    np.testing.assert_allclose((engine.values_V - model_engine.values_V).numpy(), want, rtol=0, atol=1e-6)

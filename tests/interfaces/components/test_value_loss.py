from __future__ import annotations

import math

import pytest
import torch

from realign.api import Model, SequenceSample, stat_values
from realign.errors import SettingsError
from realign.functional import ValueLoss, value_loss
from realign.interfaces.components import ValueObjective, trained, value_stats
from realign.testing import BigramEngine, random_batch

KEYS = ["input_ids", "loss_mask", "values", "returns"]


def test_metrics_by_hand():
    data = SequenceSample.from_sequences(["a"], {"input_ids": [[[1, 2, 3, 4]]]}).with_tokens(
        loss_mask=torch.tensor([False, True, True, True]),
        values=torch.tensor([9.0, 1, 2, 3]),
        returns=torch.tensor([9.0, 2, 2, 5]),
    )
    stats = stat_values(value_stats(data, Model("critic", BigramEngine())))
    deviations = {"return_std": math.sqrt(6 / 3), "old_value_std": math.sqrt(2 / 3)}
    assert stats == pytest.approx({"return_mean": 3, "old_value_mean": 2, "explained_variance": 1 - 5 / 6} | deviations)
    flat = data.with_tokens(returns=torch.ones(4))
    assert "explained_variance" not in value_stats(flat, Model("critic", BigramEngine()))


def test_sequences_without_a_trained_token_cost_no_pass():
    data = random_batch(0).select(KEYS)
    kept = trained(data)
    assert [bool(m.any()) for m in kept.sequences("loss_mask")] == [True] * kept.lengths["input_ids"].counts.sum()
    nothing = data.with_tokens(loss_mask=torch.zeros_like(data["loss_mask"]))
    assert trained(nothing) is nothing


@pytest.mark.parametrize(
    "objective",
    [ValueObjective(), ValueObjective(None), ValueObjective(kind="huber", huber_delta=0.5, coef=3.0)],
    ids=str,
)
def test_the_loss_and_its_metrics_are_those_of_the_formula_without_the_coefficient(objective):
    data = random_batch(2).select(KEYS)
    values_T, mask_T = data["values"] + 0.3, data["loss_mask"]
    args = (values_T, data["values"], data["returns"], mask_T)
    want_T, clipped_T = value_loss(*args, clip=objective.clip, kind=objective.kind, huber_delta=objective.huber_delta)
    loss_T, stats = objective(values_T, data)
    assert torch.equal(loss_T, want_T)
    assert stat_values(stats) == pytest.approx(
        {
            "value_loss": float(want_T[mask_T].mean()),
            "value_clip_fraction": float(clipped_T[mask_T].double().mean()),
            "value_mean": float(values_T[mask_T].mean()),
            "value_error": float((values_T - data["returns"])[mask_T].square().mean()),
        }
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip": 0}, "clip=0: must be above 0 .*or null"),
        ({"kind": "l1"}, r"kind='l1': unknown choice \(valid: mse, huber\)"),
        ({"huber_delta": 3.0}, "huber_delta=3: has no effect with kind=mse"),
        ({"kind": "huber", "huber_delta": 0.0}, r"huber_delta=0\.0: must be above 0"),
        ({"coef": 0.0}, r"coef=0\.0: must be above 0"),
    ],
)
def test_wrong_settings_raise(settings, message):
    with pytest.raises(SettingsError, match=message):
        ValueObjective(**settings)


def test_the_launch_table_lists_the_loss():
    assert ValueObjective().describe() == "mse, clipped at 0.2 from the old value"
    assert ValueObjective(None, ValueLoss.huber, 0.5).describe() == "huber beyond 0.5"

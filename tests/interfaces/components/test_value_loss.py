from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from realign.api import Model, SequenceSample, stat_values
from realign.interfaces.components import ValueObjective, value_stats
from realign.interfaces.components.value_loss import ValueLoss, value_loss
from realign.testing import BigramEngine, random_batch

unclipped = partial(value_loss, clip=None, kind=ValueLoss.mse, huber_delta=10.0)
KEYS = ["input_ids", "loss_mask", "values", "returns"]


def ones(n):
    return torch.ones(n, dtype=torch.bool)


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


# Columns: value, old value, return, loss, d loss / d value, clipped (clip 0.2).
VALUE_TABLE = [
    (1.0, 1.0, 3.0, 2.0, -2.0, False),
    (1.1, 1.0, 3.0, 1.805, -1.9, False),
    (1.5, 1.0, 3.0, 1.62, 0.0, True),  # moved beyond the range towards the target: clipped to 1.2
    (0.5, 1.0, 3.0, 3.125, -2.5, False),  # moved away from the target: the unclipped error is larger
    (1.5, 1.0, 0.0, 1.125, 1.5, False),
]


@pytest.mark.parametrize(("value", "old", "target", "loss", "slope", "clipped"), VALUE_TABLE)
def test_trap_c14_value_clip(value, old, target, loss, slope, clipped):
    values_T = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    loss_T, clipped_T = unclipped(
        values_T, torch.tensor([old]).double(), torch.tensor([target]).double(), ones(1), clip=0.2
    )
    loss_T.sum().backward()
    assert loss_T.item() == pytest.approx(loss, abs=1e-12)
    assert float(values_T.grad) == pytest.approx(slope, abs=1e-12)
    assert clipped_T.item() is clipped


def test_trap_c14_values_inside_the_range_are_not_clipped_by_rounding():
    generator = torch.Generator().manual_seed(0)
    values_T, old_T, returns_T = torch.rand(3, 1000, generator=generator) * 0.19 - 0.095
    held_T = old_T + (values_T - old_T).clamp(-0.2, 0.2)
    # so an error computed from the clipped step alone would count as clipped
    assert ((held_T - returns_T) ** 2 > (values_T - returns_T) ** 2).any()
    _, clipped_T = unclipped(values_T, old_T, returns_T, ones(1000), clip=0.2)
    assert not clipped_T.any()


def test_trap_c15_the_critic_does_not_learn_from_the_prompt():
    values_T = torch.tensor([5.0, 1.0], requires_grad=True)
    loss_T, _ = unclipped(values_T, torch.zeros(2), torch.zeros(2), torch.tensor([False, True]), clip=0.2)
    loss_T.sum().backward()
    assert loss_T.tolist() == [0.0, 0.5]
    assert values_T.grad.tolist() == [0.0, 1.0]


def test_trap_a5_a_nan_on_the_mask_is_not_hidden():
    nan_T = torch.tensor([math.nan])
    assert unclipped(nan_T, torch.zeros(1), torch.ones(1), ones(1), clip=0.2)[0].isnan().all()

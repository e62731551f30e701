from __future__ import annotations

import itertools

import pytest
import torch

from realign.errors import SettingsError
from realign.functional.losses import policy_loss
from realign.functional.packed import cu_seqlens_of
from realign.interfaces.components import Constant, SeqMeanTokenMean, SeqMeanTokenSum, TokenMean
from realign.interfaces.components.aggregation import AggregationMode, aggregate, aggregation_weight
from realign.testing import random_batch

MODES = {
    AggregationMode.token_mean: (TokenMean(), None),
    AggregationMode.seq_mean_token_mean: (SeqMeanTokenMean(), None),
    AggregationMode.seq_mean_token_sum: (SeqMeanTokenSum(), None),
    AggregationMode.constant: (Constant(8.0), 8.0),
}


def test_every_mode_of_the_function_has_its_class():
    assert MODES.keys() == set(AggregationMode)


@pytest.mark.parametrize(("mode", "made"), MODES.items())
def test_totals_and_weights_are_those_of_the_function(mode, made):
    aggregation, constant = made
    data = random_batch(1)
    loss_T, mask_T, cu_seqlens = data["values"], data["loss_mask"], data.cu_seqlens()
    assert torch.equal(aggregation.total(loss_T, mask_T, cu_seqlens), aggregate(loss_T, mask_T, cu_seqlens, mode))
    want = aggregation_weight(mask_T, cu_seqlens, mode, constant=constant)
    assert torch.equal(aggregation.weight(mask_T, cu_seqlens), want)


def test_the_constant_is_required_and_positive():
    with pytest.raises(TypeError, match="tokens"):
        Constant()
    with pytest.raises(SettingsError, match=r"tokens=0\.0: must be above 0"):
        Constant(0.0)


def test_the_launch_table_lists_the_aggregation():
    rows = [aggregation.describe() for aggregation, _ in MODES.values()]
    assert rows == ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant, 8 tokens per sequence"]


LENGTHS = [2, 4, 10]
LOSS = [1.0, 2.0, 3.0]


def batch(rows):
    cu_seqlens = cu_seqlens_of([LENGTHS[row] for row in rows])
    x_T = torch.cat([torch.full((LENGTHS[row],), LOSS[row]) for row in rows])
    return x_T, torch.ones(len(x_T), dtype=torch.bool), cu_seqlens


def mean(parts, mode, constant=None):
    total = sum(aggregate(*batch(rows), mode) for rows in parts)
    return float(total / sum(aggregation_weight(*batch(rows)[1:], mode, constant=constant) for rows in parts))


PARTITIONS = [[[0, 1, 2]], [[0], [1], [2]], [[0, 1], [2]], [[2], [1, 0]], [[1], [2, 0]]]


@pytest.mark.parametrize("parts", PARTITIONS)
def test_trap_d1_token_mean_does_not_see_micro_batches(parts):
    assert mean(parts, AggregationMode.token_mean) == 2.5


@pytest.mark.parametrize("parts", PARTITIONS)
@pytest.mark.parametrize(
    ("mode", "constant", "expected"),
    [
        (AggregationMode.token_mean, None, 40 / 16),
        (AggregationMode.seq_mean_token_mean, None, 6 / 3),
        (AggregationMode.seq_mean_token_sum, None, 40 / 3),
        (AggregationMode.constant, 20.0, 40 / 60),
    ],
)
def test_trap_d3_denominator_of_every_mode(parts, mode, constant, expected):
    assert mean(parts, mode, constant) == pytest.approx(expected, rel=1e-6)


def test_trap_d3_every_mode_is_in_the_table():
    assert {mode.value for mode in AggregationMode} == {
        "token_mean",
        "seq_mean_token_mean",
        "seq_mean_token_sum",
        "constant",
    }


@pytest.mark.parametrize("together", [True, False])
def test_trap_d2_opposite_advantages_of_unequal_lengths(together):
    rows = [(1, 1.0), (3, -1.0)]
    parts = [rows] if together else [[row] for row in rows]
    total = weight = 0.0
    for part in parts:
        cu_seqlens = cu_seqlens_of([length for length, _ in part])
        advantages_T = torch.cat([torch.full((length,), value) for length, value in part])
        mask_T = torch.ones(len(advantages_T), dtype=torch.bool)
        zeros_T = torch.zeros(len(advantages_T))
        loss_T = policy_loss(zeros_T, zeros_T, advantages_T, mask_T).loss_T
        total += float(aggregate(loss_T, mask_T, cu_seqlens, AggregationMode.token_mean))
        weight += float(aggregation_weight(mask_T, cu_seqlens, AggregationMode.token_mean))
    assert total / weight == 0.5


def test_trap_d6_masked_out_sequences_are_not_in_the_denominator():
    cu_seqlens = cu_seqlens_of([4, 1])
    mask_T = torch.tensor([True, True, True, True, False])
    weights = {
        mode: float(aggregation_weight(mask_T, cu_seqlens, mode, constant=8.0 if mode == "constant" else None))
        for mode in AggregationMode
    }
    assert weights == {"token_mean": 4, "seq_mean_token_mean": 1, "seq_mean_token_sum": 1, "constant": 8}


def test_trap_d3_the_mask_inside_a_sequence_sets_its_length():
    x_T = torch.tensor([1.0, 100.0, 3.0, 5.0])
    mask_T = torch.tensor([True, False, True, True])
    assert float(aggregate(x_T, mask_T, cu_seqlens_of([3, 1]), AggregationMode.seq_mean_token_mean)) == 2.0 + 5.0


def test_every_token_of_a_sequence_gets_the_gradient_of_its_weight():
    x_T = torch.zeros(3, requires_grad=True)
    mask_T = torch.ones(3, dtype=torch.bool)
    aggregate(x_T, mask_T, cu_seqlens_of([2, 1]), AggregationMode.seq_mean_token_mean).backward()
    assert x_T.grad.tolist() == [0.5, 0.5, 1.0]


@pytest.mark.parametrize(("mode", "constant"), list(itertools.product(AggregationMode, [None, 8.0, 0.0, -1.0])))
def test_constant_belongs_to_its_mode_only(mode, constant):
    mask_T = torch.ones(2, dtype=torch.bool)
    if (mode is AggregationMode.constant) == (constant is not None) and constant in (None, 8.0):
        assert aggregation_weight(mask_T, cu_seqlens_of([2]), mode, constant=constant) > 0
    else:
        with pytest.raises(ValueError, match="constant"):
            aggregation_weight(mask_T, cu_seqlens_of([2]), mode, constant=constant)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="token_maen"):
        aggregate(torch.zeros(1), torch.ones(1, dtype=torch.bool), cu_seqlens_of([1]), "token_maen")

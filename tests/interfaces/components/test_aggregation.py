from __future__ import annotations

import pytest
import torch

from realign.functional.losses import policy_loss
from realign.functional.packed import cu_seqlens_of
from realign.interfaces.components import (
    Aggregation,
    Constant,
    SeqMeanTokenMean,
    SeqMeanTokenSum,
    TokenMean,
    aggregation,
)

MODES = [TokenMean(), SeqMeanTokenMean(), SeqMeanTokenSum(), Constant(8.0)]


LENGTHS = [2, 4, 10]
LOSS = [1.0, 2.0, 3.0]


def batch(rows):
    cu_seqlens = cu_seqlens_of([LENGTHS[row] for row in rows])
    x_T = torch.cat([torch.full((LENGTHS[row],), LOSS[row]) for row in rows])
    return x_T, torch.ones(len(x_T), dtype=torch.bool), cu_seqlens


def mean(parts, mode):
    total = sum(mode.total(*batch(rows)) for rows in parts)
    return float(total / sum(mode.weight(*batch(rows)[1:]) for rows in parts))


PARTITIONS = [[[0, 1, 2]], [[0], [1], [2]], [[0, 1], [2]], [[2], [1, 0]], [[1], [2, 0]]]


@pytest.mark.parametrize("parts", PARTITIONS)
def test_trap_d1_token_mean_does_not_see_micro_batches(parts):
    assert mean(parts, TokenMean()) == 2.5


@pytest.mark.parametrize("parts", PARTITIONS)
@pytest.mark.parametrize(
    ("mode", "expected"),
    [(TokenMean(), 40 / 16), (SeqMeanTokenMean(), 6 / 3), (SeqMeanTokenSum(), 40 / 3), (Constant(20.0), 40 / 60)],
)
def test_trap_d3_denominator_of_every_mode(parts, mode, expected):
    assert mean(parts, mode) == pytest.approx(expected, rel=1e-6)


def test_trap_d3_every_mode_is_in_the_table():
    kinds = {kind for kind in vars(aggregation).values() if isinstance(kind, type) and issubclass(kind, Aggregation)}
    assert kinds - {Aggregation} == {type(mode) for mode in MODES}


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
        total += float(TokenMean().total(loss_T, mask_T, cu_seqlens))
        weight += float(TokenMean().weight(mask_T, cu_seqlens))
    assert total / weight == 0.5


def test_trap_d6_masked_out_sequences_are_not_in_the_denominator():
    cu_seqlens = cu_seqlens_of([4, 1])
    mask_T = torch.tensor([True, True, True, True, False])
    assert [float(mode.weight(mask_T, cu_seqlens)) for mode in MODES] == [4, 1, 1, 8]


def test_trap_d3_the_mask_inside_a_sequence_sets_its_length():
    x_T = torch.tensor([1.0, 100.0, 3.0, 5.0])
    mask_T = torch.tensor([True, False, True, True])
    assert float(SeqMeanTokenMean().total(x_T, mask_T, cu_seqlens_of([3, 1]))) == 2.0 + 5.0

from __future__ import annotations

import pytest
import torch

from realign.errors import SettingsError
from realign.functional import AggregationMode, aggregate, aggregation_weight
from realign.interfaces.components import Constant, SeqMeanTokenMean, SeqMeanTokenSum, TokenMean
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

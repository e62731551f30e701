from __future__ import annotations

import pytest
import torch

from realign.api import Lengths, SequenceSample
from realign.api.router_experts import ROUTER_EXPERTS, experts_per_token, with_experts, without_experts


def batch(name="a"):
    return SequenceSample.from_sequences([name, f"{name}2"], {"input_ids": [[[1, 2], [3]], [[4, 5, 6]]]})


def experts(tokens, first=0):
    return torch.arange(first, first + 4 * tokens).view(tokens, 4).to(torch.int16)


def test_batches_with_and_without_records_are_joined_and_split():
    known = with_experts(batch(), [experts(2), experts(1), experts(3)])
    both = SequenceSample.gather([without_experts(batch("b")), known])
    assert experts_per_token(both)[:6].unique().tolist() == [-1]
    assert torch.equal(experts_per_token(both)[6:], known[ROUTER_EXPERTS])
    assert experts_per_token(both.take([0, 1])) is None
    assert torch.equal(experts_per_token(both.take([3])), experts(3))
    assert experts_per_token(without_experts(batch())) is None
    assert experts_per_token(batch()) is None


def test_a_sequence_has_a_row_for_every_token_or_none():
    odd = batch().with_data({ROUTER_EXPERTS: experts(2)}, lengths=Lengths.of([[1, 1], [0]]))
    with pytest.raises(ValueError, match="one row per token of 'input_ids', or none"):
        experts_per_token(odd)

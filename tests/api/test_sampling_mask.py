from __future__ import annotations

import pytest
import torch

from realign.api import Lengths, SequenceSample
from realign.api.sampling_mask import SAMPLING_MASK, SamplingMask, masks_of, support_of, with_masks

CPU = torch.device("cpu")


def batch():
    return SequenceSample.from_sequences(["a", "b"], {"input_ids": [[[1, 2, 3], [4]], [[5, 6]]]})


def sets(mask):
    return [x.tolist() for x in mask.ids_K.split(mask.counts_N.tolist())]


def test_the_record_of_a_response_stands_at_its_tokens():
    data = with_masks(batch(), [SamplingMask.of([[7, 2], [3]]), None, SamplingMask.of([[6, 9, 8]])])
    assert data[SAMPLING_MASK].tolist() == [0, 2, 1, 7, 2, 3, 0, 3, 6, 9, 8]
    assert data.lengths[SAMPLING_MASK].as_tuples() == ((6, 0), (5,))
    first, none, last = masks_of(data)
    assert (sets(first), none, sets(last)) == ([[], [7, 2], [3]], None, [[], [6, 9, 8]])
    support = support_of(data, CPU)
    assert support.counts_N.tolist() == [0, 2, 1, 0, 0, 3]
    assert support.ids_K.tolist() == [7, 2, 3, 6, 9, 8]
    assert support_of(batch(), CPU) is None


def test_sizes_must_match_the_ids_and_the_tokens():
    with pytest.raises(ValueError, match="sequence 1 has 1 tokens, but its sampling mask has 2"):
        with_masks(batch(), [None, SamplingMask.none(2), None])
    odd = batch().with_data({SAMPLING_MASK: torch.tensor([0, 2, 1, 7])}, lengths=Lengths.of([[4, 0], [0]]))
    with pytest.raises(ValueError, match="3 tokens has 4 entries, but its sets have 3 ids"):
        masks_of(odd)

from __future__ import annotations

import pytest
import torch

from realign.api import MicroBatchSpec
from realign.mistakes import raised_on_purpose


def test_only_a_raise_in_realign_is_on_purpose():
    with pytest.raises(ValueError, match="n_microbatches") as ours:
        MicroBatchSpec(n_microbatches=0)
    with pytest.raises(RuntimeError) as torchs:
        torch.ones(2) @ torch.ones(3)
    with pytest.raises(ValueError, match="here") as own:
        raise ValueError("here")
    assert [raised_on_purpose(e.value) for e in (ours, torchs, own)] == [True, False, False]
    assert not raised_on_purpose(ValueError("never raised"))

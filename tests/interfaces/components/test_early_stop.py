from __future__ import annotations

import torch

from realign.api import Mean
from realign.interfaces.components import EarlyStop


def stats(**values: float) -> dict:
    return {name: Mean(torch.tensor(value), torch.ones(())) for name, value in values.items()}


def test_a_step_within_its_bounds_is_allowed_and_one_beyond_any_of_them_is_not():
    stop = EarlyStop(kl=0.125, ratio=2.0)
    assert stop.allows(stats(approx_kl=0.125, ratio_mean=2.0))
    assert not stop.allows(stats(approx_kl=0.126, ratio_mean=1.0))
    assert not stop.allows(stats(approx_kl=0.0, ratio_mean=2.1))
    assert EarlyStop(ratio=2.0).allows(stats(approx_kl=9.0, ratio_mean=1.0))
    assert stop.allows(stats())  # an empty mini-batch lacks this metric

from __future__ import annotations

import itertools

import pytest
import torch

from realign.functional import Scope, identity, normalize
from realign.interfaces.components import Normalization


@pytest.mark.parametrize(("mean", "std"), list(itertools.product(Scope, Scope)))
def test_every_setting_reaches_the_function(mean, std):
    generator = torch.Generator().manual_seed(0)
    x_N, group_N = torch.randn(12, generator=generator), torch.arange(12) // 4
    mask_N = torch.rand(12, generator=generator) < 0.8
    options = {"leave_one_out": mean is not Scope.none, "unbiased": True, "eps": 0.3, "eps_inside_sqrt": True}
    for name in (None, *options):
        chosen = {k: v for k, v in options.items() if k in (name, "eps")}
        got = Normalization(mean, std, **chosen)(x_N, group_N, mask_N, identity)
        assert torch.equal(got, normalize(x_N, group_N, mask_N, mean=mean, std=std, **chosen))


def test_statistics_of_the_batch_go_through_reduce():
    calls = []

    def reduce(x):
        calls.append(x)
        return x

    Normalization("batch", "none")(torch.ones(3), torch.zeros(3).long(), torch.ones(3, dtype=torch.bool), reduce)
    assert calls

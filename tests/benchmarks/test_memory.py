from __future__ import annotations

import torch

from benchmarks.memory import MemoryCount


def test_tensors_count_while_they_live_and_views_do_not():
    weight = torch.ones(10, 10, requires_grad=True)
    with MemoryCount() as count:
        doubled = weight * 2
        view = doubled.view(100)
        assert count.live == 400
        del doubled
        assert count.live == 400
        del view
        assert count.live == 0
        detached = weight.detach()  # storage that existed before does not count
        assert count.live == 0
        del detached
    assert count.peak == 400
    assert count.largest == 100


def test_the_backward_pass_counts():
    weight = torch.ones(10, 10, requires_grad=True)
    with MemoryCount() as count:
        total = (weight * weight).exp().sum()
        forward = count.peak
        total.backward()
        del total
        assert count.live == 400  # the gradient
    assert forward == 400 + 400  # the square is freed as soon as its exponential exists
    assert count.peak > forward


def test_what_is_freed_at_once_still_sets_the_peak():
    with MemoryCount() as count:
        for _ in range(3):
            torch.zeros(1000).sum()
        assert count.live == 0
    assert count.peak == 4004

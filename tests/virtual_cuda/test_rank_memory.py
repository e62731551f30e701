from __future__ import annotations

from dataclasses import replace

import pytest

from realign.engines import Sharding
from tests.virtual_cuda.rank_memory import SIZES, Case, config_of, estimated, full_depth, tracked

GIB = 2**30


@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_estimate_of_a_rank_is_within_15_percent_of_what_torch_counts(checkpointing):
    case = Case("7B", ranks=8, checkpointing=checkpointing)
    config = config_of("7B", layers=2)
    assert estimated(case, config) == pytest.approx(tracked(case, config).step, rel=0.15)


def test_a_rank_of_64_loads_and_trains_72b_below_60_gib():
    bytes_ = full_depth(Case("72B", ranks=64, tokens=4096))
    assert bytes_.loading < 60 * GIB
    assert bytes_.step < 60 * GIB


CONTEXT = Case("7B", ranks=16, tokens=131072, sharding=Sharding(context=4), sequences=1)
"""One sequence of 128k tokens; the number of ranks that divide it must divide the 28 attention heads."""


def test_16_ranks_train_7b_on_128k_tokens_below_80_gib():
    assert full_depth(CONTEXT).step < 80 * GIB


@pytest.mark.parametrize("checkpointing", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sharding", [Sharding(context=4), Sharding(context=2, replicate=2)], ids=str)
def test_the_estimate_follows_the_mesh(checkpointing, sharding):
    case = replace(CONTEXT, checkpointing=checkpointing, sharding=sharding)
    assert estimated(case, config_of("7B", layers=2)) == pytest.approx(tracked(case, config_of("7B", 2)).step, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("model", SIZES)
def test_the_estimate_at_full_depth_is_within_15_percent(model, ranks):
    case = Case(model, ranks)
    assert estimated(case, config_of(model)) == pytest.approx(full_depth(case).step, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("dimensions", [{"expert": 8}, {"tensor": 4}, {"tensor": 2, "expert": 4}], ids=str)
def test_the_estimate_of_a_mixture_of_experts_whose_ranks_divide_it_is_within_15_percent(dimensions):
    case = Case("30B of 128 experts", 16, sharding=Sharding(**dimensions))
    assert estimated(case, config_of(case.model)) == pytest.approx(full_depth(case).step, rel=0.15)

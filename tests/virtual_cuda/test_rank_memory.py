from __future__ import annotations

from dataclasses import replace

import pytest

from realign.engines import Sharding
from tests.virtual_cuda.rank_memory import Case, config_of, estimated, full_depth, tracked

GIB = 2**30
CONTEXT = Case("7B", ranks=16, tokens=131072, sharding=Sharding(context=4), sequences=1)
"""One sequence of 128k tokens; the number of ranks that divide it must divide the 28 attention heads."""
CASES = [
    (Case("7B", ranks=8), 2),
    (Case("7B", ranks=8, checkpointing=False), 2),
    (replace(CONTEXT, sharding=Sharding(context=2, replicate=2)), 2),
    (Case("7B", ranks=8, sharding=Sharding(pipeline=2)), 6),
    (Case("30B of 128 experts", 16, sharding=Sharding(expert=8)), 2),
]
"""Training steps with some layers."""


@pytest.mark.parametrize(("case", "layers"), CASES, ids=str)
def test_the_estimate_of_a_rank_is_within_15_percent_of_what_torch_counts(case, layers):
    config = config_of(case.model, layers)
    stages = [replace(case, stage=stage) for stage in range(case.sharding.pipeline)]
    assert estimated(case, config) == pytest.approx(max(tracked(stage, config).step for stage in stages), rel=0.15)


def test_16_ranks_train_7b_on_128k_tokens_below_80_gib():
    assert full_depth(CONTEXT).step < 80 * GIB

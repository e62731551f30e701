"""Test the counts of the mesh benchmark at small sizes."""

from __future__ import annotations

import pytest

from benchmarks.mesh import RANKS, peak_of_step
from realign.engines import Sharding
from tests.engines.distributed.run_ranks import run_ranks


@pytest.mark.slow
def test_four_ranks_need_at_most_35_percent_of_the_activations_of_one_process() -> None:
    (one,) = run_ranks(1, peak_of_step, 4096, Sharding())
    assert max(run_ranks(RANKS, peak_of_step, 4096, Sharding(context=RANKS))) < 0.35 * one

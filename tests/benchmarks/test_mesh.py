"""Test the counts of the mesh benchmark at small sizes."""

from __future__ import annotations

import pytest

from benchmarks.mesh import MESHES, RANKS, counted_traffic, expected_traffic, peak_of_step
from realign.engines import Sharding
from tests.engines.distributed.run_ranks import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_send_the_bytes_that_a_plan_expects(mesh: str) -> None:
    counted, expected = counted_traffic(1024, 8, MESHES[mesh]), expected_traffic(1024, MESHES[mesh])
    assert counted.keys() == expected.keys()
    for dimension, size in expected.items():
        assert counted[dimension] == pytest.approx(size, rel=0.03, abs=10_000), dimension  # small sums of norms


@pytest.mark.slow
def test_four_ranks_need_at_most_35_percent_of_the_activations_of_one_process() -> None:
    (one,) = run_ranks(1, peak_of_step, 4096, Sharding())
    assert max(run_ranks(RANKS, peak_of_step, 4096, Sharding(context=RANKS))) < 0.35 * one

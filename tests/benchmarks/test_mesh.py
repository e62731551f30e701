"""Test the counts of the mesh benchmark at small sizes."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.mesh import MESHES, RANKS, expected_traffic, peak_of_step, traffic_of_step
from realign.engines import Sharding
from tests.engines.distributed.run_ranks import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_send_the_bytes_of_the_formula(mesh: str) -> None:
    sent: Counter[str] = max(run_ranks(RANKS, traffic_of_step, 1024, 8, MESHES[mesh]), key=Counter.total)
    expected = expected_traffic(1024, MESHES[mesh])
    for kind, size in expected.items():
        assert sent[kind] == pytest.approx(size, rel=0.03, abs=10_000), kind  # small sums of losses and norms


@pytest.mark.slow
def test_four_ranks_need_at_most_35_percent_of_the_activations_of_one_process() -> None:
    (one,) = run_ranks(1, peak_of_step, 4096, Sharding())
    assert max(run_ranks(RANKS, peak_of_step, 4096, Sharding(context=RANKS))) < 0.35 * one

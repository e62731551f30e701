from __future__ import annotations

from dataclasses import replace

import pytest

from extras.planner.tests.cluster import ASSUMED, CLUSTER, DEVICE, LOAD
from realign_planner.options import Accelerator, Device, PlanOptions
from realign_planner.placement_memory import memory_of
from realign_planner.placements import PlannedGroup, PlannedPlacement, placements
from realign_planner.predict import Cluster, predict
from realign_planner.search import EQUAL, search


def cluster(**options):
    return replace(CLUSTER, options=PlanOptions(**options))


@pytest.mark.parametrize("options", [{"devices": 2, "device": "cpu"}, {"devices": 4, "nodes": 2}])
def test_the_best_plan_is_the_fastest_of_all_up_to_the_preference_for_less_staleness(options):
    here = cluster(**options, max_staleness=2, show=20)
    plans = search(LOAD, here, servers=True)
    every = [predict(one, LOAD, here) for one in placements(LOAD, here.options, servers=True)]
    assert plans.considered == plans.fitting == len(every)
    assert plans.best[0].tokens_per_s >= EQUAL * max(one.tokens_per_s for one in every)
    assert [one.tokens_per_s for one in plans.best] == sorted((one.tokens_per_s for one in plans.best), reverse=True)
    allocations = [replace(one.placement, max_staleness=None) for one in plans.best]
    assert len(set(allocations)) == len(allocations)
    assert plans.too_large == []


def test_less_staleness_is_preferred_among_equals():
    here = cluster(devices=2, device="cpu", max_staleness=4, show=20)
    predictions = [one for one in search(LOAD, here, servers=False).best if one.placement.max_staleness is not None]
    assert predictions
    for one in predictions:
        by_bound = [predict(replace(one.placement, max_staleness=k), LOAD, here).tokens_per_s for k in range(5)]
        fast = [bound for bound, tokens in enumerate(by_bound) if tokens >= EQUAL * max(by_bound)]
        assert one.placement.max_staleness == fast[0]


def test_a_faster_plan_that_does_not_fit_is_shown_apart():
    one = PlannedPlacement((PlannedGroup(("actor", "ref"), 1),))
    needed = memory_of(one, LOAD, DEVICE)["actor"]
    small = Device(Accelerator(flops=100.0, bandwidth=10.0, memory=needed * 0.5), ASSUMED)
    plans = search(LOAD, Cluster(PlanOptions(devices=1), small), servers=False)
    assert (plans.best, plans.fitting) == ([], 0)
    assert [prediction.fits for prediction in plans.too_large] == [False]

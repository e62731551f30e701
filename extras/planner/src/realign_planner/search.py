"""Search the placements of an experiment: estimate all of them, and simulate the most promising ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from realign_planner.placement_memory import fits, memory_of
from realign_planner.placements import PlannedMesh, PlannedPlacement, placements
from realign_planner.predict import Cluster, Prediction, costs_of, predict, schedule, with_steps
from realign_planner.simulator import RuntimeSchedule, simulate
from realign_planner.workload import Workload

SIMULATED = 8
"""Number of fitting allocations of devices to simulate, each with its fastest mesh and every staleness bound."""
TOO_LARGE = 1
"""Number of allocations that do not fit to simulate as well."""
EQUAL = 0.98
"""Fraction of the highest throughput of an allocation from which on a smaller staleness bound is preferred."""


@dataclass(frozen=True)
class Search:
    """Result of a search."""

    best: Sequence[Prediction]
    """Fitting placements, fastest first."""
    too_large: Sequence[Prediction]
    """Placements that do not fit and whose predicted throughput is higher, fastest first."""
    considered: int
    """Number of placements."""
    fitting: int
    """Number of placements that fit."""


def search(load: Workload, cluster: Cluster, *, servers: bool) -> Search:
    """Return the fastest placements.

    Args:
        load: work of the experiment.
        cluster: devices and their costs.
        servers: whether to consider inference servers.
    """
    candidates = list(placements(load, cluster.options, servers))
    # Staleness does not change the memory.
    allocations = {replace(p, max_staleness=None) for p in candidates}
    fit = {p for p in allocations if fits(memory_of(p, load, cluster.device), cluster.device)}
    fitting = [p for p in candidates if replace(p, max_staleness=None) in fit]
    bounds = _Bounds(load, cluster)
    best = _simulated(_promising(fitting, bounds, SIMULATED), load, cluster)
    others = _promising([p for p in candidates if p not in fitting], bounds, TOO_LARGE)
    fastest = best[0].tokens_per_s if best else 0.0
    faster = [prediction for prediction in _simulated(others, load, cluster) if prediction.tokens_per_s > fastest]
    return Search(best[: cluster.options.show], faster, len(candidates), len(fitting))


def _promising(candidates: Sequence[PlannedPlacement], bounds: _Bounds, number: int) -> list[list[PlannedPlacement]]:
    """Return the allocations with the lowest bounds of the seconds of a step, each with its staleness bounds.

    Of the meshes of an allocation, only the one with the lowest bound counts.
    """
    allocations: dict[PlannedPlacement, dict[PlannedMesh, list[PlannedPlacement]]] = {}
    for placement in candidates:
        devices = replace(placement, max_staleness=None, mesh=PlannedMesh())
        allocations.setdefault(devices, {}).setdefault(placement.mesh, []).append(placement)

    def fastest(same: Sequence[PlannedPlacement]) -> float:
        return min(map(bounds.step_s, same))

    best = [min(meshes.values(), key=fastest) for meshes in allocations.values()]
    return sorted(best, key=fastest)[:number]


def _simulated(allocations: Sequence[Sequence[PlannedPlacement]], load: Workload, cluster: Cluster) -> list[Prediction]:
    """Predict allocations, each with the smallest staleness bound of nearly its highest throughput; fastest first."""
    predictions = []
    for same in allocations:
        predicted = sorted(
            (predict(placement, load, cluster) for placement in same), key=lambda p: p.placement.max_staleness or 0
        )
        most = max(prediction.tokens_per_s for prediction in predicted)
        predictions.append(next(prediction for prediction in predicted if prediction.tokens_per_s >= EQUAL * most))
    return sorted(predictions, key=lambda prediction: -prediction.tokens_per_s)


class _Bounds:
    """Lower bounds of the seconds of a step, from one simulated batch for each kind of sampling."""

    def __init__(self, load: Workload, cluster: Cluster) -> None:
        self._load, self._cluster = load, cluster
        self._found: dict[object, tuple[float, float]] = {}

    def step_s(self, placement: PlannedPlacement) -> float:
        """Return a lower bound: sampling of a batch may overlap with `max_staleness` further steps."""
        costs = costs_of(placement, self._load, self._cluster)
        plan = schedule(placement, self._load, self._cluster)
        train_s = costs.train_step_s + self._load.tokens * costs.train_token_s
        batch_s, busy_s = self._sampling(placement, plan)
        if not placement.max_staleness:
            return batch_s + train_s + costs.sync_s
        together = train_s + busy_s if plan.shared else max(train_s, busy_s + costs.sync_s)
        return max(together, batch_s / (placement.max_staleness + 1))

    def _sampling(self, placement: PlannedPlacement, plan: RuntimeSchedule) -> tuple[float, float]:
        """Return the seconds until a batch is scored, and the mean seconds in which an engine decodes."""
        costs = replace(costs_of(placement, self._load, self._cluster), train_step_s=0.0, train_token_s=0.0, sync_s=0.0)
        key = (costs, plan.engines, plan.slots)
        if key not in self._found:
            report = simulate(costs, with_steps(self._load.work, 1), RuntimeSchedule(None, plan.engines, plan.slots))
            self._found[key] = (report.ends[0], report.generating_s / plan.engines)
        return self._found[key]

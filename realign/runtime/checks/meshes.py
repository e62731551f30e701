"""The ranks of each role's model, and whether they can divide it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypedDict

from realign.api.model import ModelSpec
from realign.api.router_experts import ROUTER_EXPERTS
from realign.engines.shared_model import Share, SharedModel
from realign.ranks import expected_size
from realign.runtime.experiment import Experiment
from realign.runtime.processes.placement import plan_groups


class _RankWork(TypedDict):
    """What a run asks of the ranks of a role, see `ModelSpec.check_ranks`."""

    replays: bool
    referenced: bool


def describe_meshes(experiment: Experiment) -> dict[str, str]:
    """Describe the ranks of each role's model that several ranks divide; see `ModelSpec.describe_ranks`."""
    meshes = {role: spec.describe_ranks(role, ranks) for role, spec, ranks in _on_several_ranks(experiment)}
    return {role: mesh for role, mesh in meshes.items() if mesh is not None}


def check_meshes(experiment: Experiment) -> None:
    """Check that the ranks of each role can divide its model.

    Raises:
        ConfigError: see `ModelSpec.check_ranks`.
    """
    for role, spec, ranks in _on_several_ranks(experiment):
        spec.check_ranks(role, ranks, **rank_work(experiment, role))


def rank_work(experiment: Experiment, role: str) -> _RankWork:
    """Return what a run asks of the ranks of a role, and of the roles that share its model."""
    specs = [experiment.models.get(view) for view in experiment.roles]
    return _RankWork(
        replays=any(
            ROUTER_EXPERTS in rpc.own_keys for rpc in experiment.graph.rpcs if experiment.owner_of(rpc.model) == role
        ),
        referenced=any(
            isinstance(view, SharedModel) and view.of == role and view.branch is Share.reference for view in specs
        ),
    )


def _on_several_ranks(experiment: Experiment) -> Iterator[tuple[str, ModelSpec, int]]:
    together = [(tuple(experiment.roles), expected_size())]
    if experiment.runtime.starts_workers:
        together = [(group.roles, group.devices) for group in plan_groups(experiment)]
    for roles, ranks in together:
        for role in roles:
            if ranks > 1 and (spec := experiment.models.get(role)) is not None:
                yield role, spec, ranks

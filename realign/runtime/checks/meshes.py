"""The ranks of each role's model, and whether they can divide it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from realign.api.router_experts import ROUTER_EXPERTS
from realign.engines.distributed.ranks import expected_size
from realign.engines.distributed.sharding import Sharding, check_reference
from realign.engines.module_reader import check_4bit
from realign.engines.shared_model import Share, SharedModel
from realign.engines.transformers_model import TransformersModel
from realign.runtime.experiment import Experiment
from realign.runtime.processes.placement import plan_groups

if TYPE_CHECKING:
    from realign.engines.distributed.divisions import Divisions


def ranks_of_roles(experiment: Experiment) -> dict[str, int]:
    """Return the number of ranks of each role with a transformers model on several ranks."""
    together = [(tuple(experiment.roles), expected_size())]
    if experiment.runtime.starts_workers:
        together = [(group.roles, group.devices) for group in plan_groups(experiment)]
    return {
        role: ranks
        for roles, ranks in together
        for role in roles
        if ranks > 1 and isinstance(experiment.models.get(role), TransformersModel)
    }


def describe_meshes(experiment: Experiment) -> dict[str, str]:
    """Describe the ranks of each role's model, for roles on several ranks; see `Sharding.describe`."""
    return {
        role: _model(experiment, role).sharding.describe(role, ranks)
        for role, ranks in ranks_of_roles(experiment).items()
    }


def check_meshes(experiment: Experiment) -> None:
    """Check that the ranks of each role can divide its model.

    Raises:
        ConfigError: see `MeshChecks.check`.
    """
    checks = MeshChecks(experiment)
    for role, ranks in ranks_of_roles(experiment).items():
        checks.check(role, _model(experiment, role).sharding, ranks)


def _model(experiment: Experiment, role: str) -> TransformersModel:
    spec = experiment.models[role]
    assert isinstance(spec, TransformersModel)
    return spec


class MeshChecks:
    """What the launch of an experiment requires of the meshes of its roles. It knows models by their config."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._divisions: dict[str, Divisions] = {}

    def check(self, role: str, sharding: Sharding, ranks: int) -> None:
        """Check that ranks can divide the model of a role, which is not a `SharedModel`.

        Args:
            role: the role.
            sharding: the mesh.
            ranks: number of ranks; a single one can do everything.

        Raises:
            ConfigError: they can't. The message has the setting and the reason.
        """
        if ranks == 1:
            return
        spec = _model(self._experiment, role)
        if spec.load_in_4bit:
            check_4bit(f"models.{role}", spec.trains, spec.head, ranks)
        views = (self._experiment.models.get(view) for view in self._experiment.roles)
        if any(isinstance(view, SharedModel) and view.of == role and view.branch is Share.reference for view in views):
            check_reference(role, spec.trains)
        if role not in self._divisions:
            self._divisions[role] = spec.divisions(role, replays=self._replays(role))
        self._divisions[role].check(sharding, ranks)

    def _replays(self, role: str) -> bool:
        """Return whether a call of the role, or of one that shares its model, records or replays choices of experts."""
        return any(
            ROUTER_EXPERTS in rpc.own_keys
            for rpc in self._experiment.graph.rpcs
            if self._experiment.owner_of(rpc.model) == role
        )

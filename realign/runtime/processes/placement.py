"""Plan which roles share worker processes, and the number of processes (config node `runtime.placement`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from realign.api.dataflow import nearest
from realign.engines.shared_model import SharedModel
from realign.errors import ConfigError
from realign.runtime.runtime_spec import Placement, Ray

if TYPE_CHECKING:
    from realign.runtime.experiment import Experiment

ROLLOUT = "rollout"
"""Name of the asynchronous rollout workers in a placement (rollout=async). They contain copies of the policy."""
FIELDS = ("devices", "with", "offload")


@dataclass(frozen=True)
class RoleGroup:
    """Worker processes that serve the same roles. Each process is one rank on one device."""

    roles: tuple[str, ...]
    """Roles of the group. The first one names the group."""
    devices: int = 1
    """Number of processes (data-parallel ranks). On CUDA each process has one GPU."""
    offload: frozenset[str] = frozenset()
    """Roles whose weights and optimizer state are offloaded to host memory between calls."""

    @property
    def name(self) -> str:
        """Name of the group: its first role."""
        return self.roles[0]

    def describe(self) -> str:
        """Return a human-readable description."""
        waiting = f", offloaded between calls: {', '.join(sorted(self.offload))}" if self.offload else ""
        return f"{' + '.join(self.roles)} on {self.devices} device{'s' * (self.devices != 1)}{waiting}"


def plan_groups(experiment: Experiment) -> tuple[RoleGroup, ...]:
    """Return the worker groups of an experiment.

    A role that `runtime.placement` does not list has a separate process if the graph trains it. Otherwise it shares
    the process of the first role that has one. "colocated" places all roles in one process, "separate" each role in
    its own process. A role that shares the model of another role is placed in the same process.

    Raises:
        ConfigError: The placement is invalid. The message names the key, the found value and the valid values.
    """
    held = [role for role in experiment.roles if role in experiment.models]
    owners = [role for role in held if not isinstance(experiment.models[role], SharedModel)]
    ahead = experiment.rollout.ahead
    if ahead and ROLLOUT in experiment.models:
        raise ConfigError(f"models.{ROLLOUT}: rollout=async reserves this name. Rename the role.")
    placement = experiment.runtime.placement if isinstance(experiment.runtime, Ray) else {}
    if isinstance(placement, Placement):
        others = [ROLLOUT] if ahead else []
        together = [tuple(owners)] if placement is Placement.colocated else [(role,) for role in owners]
        return tuple(RoleGroup(roles) for roles in [*together, *((name,) for name in others)])
    nodes = {role: _node(role, node) for role, node in placement.items()}
    for role in nodes:
        if role in held and role not in owners:
            of = experiment.models[role].of  # type: ignore[attr-defined]
            raise ConfigError(f"runtime.placement.{role}: it shares the model of role {of!r}. Place {of!r} instead.")
    _check_names(nodes, owners, ahead)
    trained = experiment.trained_roles
    return _groups(nodes, owners, trained, ahead)


def _node(role: str, node: Any) -> dict[str, Any]:
    """Check each field of a role's placement, and return the fields."""
    where = f"runtime.placement.{role}"
    if not isinstance(node, Mapping):
        raise ConfigError(f"{where}={node!r}: must be a mapping such as {{devices: 2}} or {{with: actor}}.")
    for name in node:
        if name not in FIELDS:
            raise ConfigError(f"{where}: unknown key {name!r}{nearest(str(name), FIELDS)}")
    devices, offload = node.get("devices", 1), node.get("offload", False)
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ConfigError(f"{where}.devices={devices!r}: must be an integer of at least 1.")
    if not isinstance(offload, bool):
        raise ConfigError(f"{where}.offload={offload!r}: must be true or false.")
    if "with" in node and not isinstance(node["with"], str):
        raise ConfigError(f"{where}.with={node['with']!r}: must be the name of a role.")
    if "with" in node and "devices" in node:
        raise ConfigError(f"{where}: with and devices cannot be combined. Set devices of {node['with']!r} instead.")
    return dict(node)


def _check_names(nodes: Mapping[str, Mapping[str, Any]], owners: list[str], ahead: bool) -> None:
    known = [*owners, *([ROLLOUT] if ahead else [])]
    for role, node in nodes.items():
        if role == ROLLOUT and not ahead:
            raise ConfigError(f"runtime.placement.{ROLLOUT} has no effect without rollout=async. Remove it.")
        if role not in known:
            raise ConfigError(f"runtime.placement.{role}: no role {role!r} has a separate model{nearest(role, known)}")
        if role == ROLLOUT and (extra := sorted(node.keys() - {"devices"})):
            raise ConfigError(f"runtime.placement.{ROLLOUT}.{extra[0]}: not valid for rollout workers. Remove it.")
        host = node.get("with")
        if host is None:
            continue
        if host not in owners or host == role:
            raise ConfigError(
                f"runtime.placement.{role}.with={host}: no other role {host!r} has a separate model"
                f"{nearest(str(host), [other for other in owners if other != role])}"
            )
        if "with" in nodes.get(host, {}):
            raise ConfigError(
                f"runtime.placement.{role}.with={host}: role {host!r} shares the processes of {nodes[host]['with']!r}. "
                f"Set with to {nodes[host]['with']!r}."
            )


def _groups(
    nodes: Mapping[str, Mapping[str, Any]], owners: list[str], trained: Collection[str], ahead: bool
) -> tuple[RoleGroup, ...]:
    hosts = {node["with"] for node in nodes.values() if "with" in node}
    own = [r for r in owners if "with" not in nodes.get(r, {}) and (r in hosts or r in nodes or r in trained)]
    # nothing trains, as in an evaluation: the first role hosts all others
    own = own or owners[:1]
    guests: dict[str, list[str]] = {role: [] for role in own}
    for role in owners:
        if role not in guests:
            guests[nodes.get(role, {}).get("with", own[0])].append(role)
    groups = []
    for host in own:
        roles = (host, *guests[host])
        offload = frozenset(role for role in roles if nodes.get(role, {}).get("offload", False))
        if offload and len(roles) == 1:
            raise ConfigError(
                f"runtime.placement.{host}.offload has no effect, since no other role shares its devices. Remove it."
            )
        devices = nodes.get(host, {}).get("devices", 1)
        if offload and devices > 1:
            role = min(offload)
            raise ConfigError(
                f"runtime.placement.{role}.offload does not support models that are sharded across {devices} devices. "
                f"Set models.{role}.sharding.offload instead."
            )
        groups.append(RoleGroup(roles, devices, offload))
    if ahead:
        groups.append(RoleGroup((ROLLOUT,), nodes.get(ROLLOUT, {}).get("devices", 1)))
    return tuple(groups)


def check_runtime(experiment: Experiment) -> None:
    """Check the runtime config of an experiment before any process is started.

    Raises:
        ConfigError: Ray is not installed, or a placement or device is invalid. The message names the key.
    """
    if experiment.runtime.starts_workers:
        if find_spec("ray") is None:
            raise ConfigError("runtime=ray needs the package ray. Run pip install 'realign-rl[ray]'.")
        plan_groups(experiment)
        for role in experiment.roles:
            spec = experiment.models.get(role)
            device = None if spec is None else spec.facts().device
            if device is not None and device.startswith("cuda:"):
                raise ConfigError(
                    f"models.{role}.device={device}: with runtime=ray each process sees only its own GPU. Set cuda or "
                    "auto."
                )

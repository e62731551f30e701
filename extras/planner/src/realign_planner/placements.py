"""Placements: which devices sample and which train, and the overrides that a placement corresponds to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product

from realign_planner.internals import MemoryModel
from realign_planner.options import DeviceKind, PlanOptions
from realign_planner.workload import Workload

SPLITS = 8
"""Number of parts in which the devices are split between sampling and training."""
LAUNCHERS = {"vllm": "--tensor-parallel-size", "sglang": "--tp-size"}
"""Option of each server for its number of devices."""


class Sampling(StrEnum):
    """Where responses are sampled."""

    trainer = "trainer"
    """On the devices of the trainer, by the trained model itself."""
    copy = "copy"
    """In the process of the trainer, by a copy of the model, during training."""
    workers = "workers"
    """On separate devices, by rollout workers of Ray."""
    servers = "servers"
    """On separate devices, by inference servers."""


@dataclass(frozen=True)
class PlannedGroup:
    """Roles that share devices."""

    roles: tuple[str, ...]
    devices: int


@dataclass(frozen=True)
class PlannedMesh:
    """Dimensions of the ranks of a group; see `Sharding`. Weights are divided over what they leave."""

    replicate: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    pipeline: int = 1


@dataclass(frozen=True)
class PlannedPlacement:
    """Devices of all roles and of sampling."""

    groups: tuple[PlannedGroup, ...]
    """Groups of roles. The first one contains the sampled role."""
    sampling: Sampling = Sampling.trainer
    samplers: int = 0
    """Devices that only sample. A copy in the process of the trainer shares its device if this is 0."""
    mesh: PlannedMesh = PlannedMesh()
    """Mesh of training. Of the devices that compute a layer together, the in-process sampler uses one."""
    server_parallel: int = 1
    """Devices of one inference server."""
    max_staleness: int | None = None
    """Staleness bound; None for rollout=sync."""

    @property
    def trainers(self) -> int:
        """Return the devices of the groups."""
        return sum(group.devices for group in self.groups)

    @property
    def devices(self) -> int:
        """Return the number of devices."""
        return self.trainers + self.samplers

    def data_ranks(self, group: PlannedGroup) -> int:
        """Return the number of ranks of a group with different prompts."""
        return max(1, group.devices // (self.mesh.context * self.mesh.tensor * self.mesh.pipeline))

    def meshed(self, model: MemoryModel) -> MemoryModel:
        """Return the memory of a model on the mesh."""
        return replace(model, **vars(self.mesh))

    @property
    def runtime(self) -> str:
        """Return what starts the processes: local, torchrun or ray."""
        if len(self.groups) > 1 or self.sampling is Sampling.workers:
            return "ray"
        if self.trainers == 1:
            return "local"
        return "torchrun" if self.max_staleness is None else "ray"

    def describe(self) -> str:
        """Return the placement in a few words."""
        trained = ", ".join(f"{'+'.join(group.roles)} on {group.devices}" for group in self.groups)
        parallel = "".join(f", {name} {size}" for name, size in vars(self.mesh).items() if size > 1)
        servers = self.samplers // self.server_parallel
        where = {
            Sampling.trainer: "",
            Sampling.copy: "; a copy samples in the same process",
            Sampling.workers: f"; rollout workers on {self.samplers}",
            Sampling.servers: f"; {servers} server{'s' * (servers != 1)} on {self.samplers}",
        }[self.sampling]
        return f"{trained}{parallel}{where}"


def placements(load: Workload, options: PlanOptions, servers: bool) -> Iterator[PlannedPlacement]:
    """Yield the placements that use all devices.

    Args:
        load: work of the experiment.
        options: the cluster.
        servers: whether to consider inference servers.
    """
    n = options.devices
    bounds: list[int | None] = list(range(options.max_staleness + 1))
    for groups in groupings(load, n):
        for mesh in meshes(groups, load, options):
            yield PlannedPlacement(groups, mesh=mesh)
    # A copy shares the device of the trainer, or on a CPU computes on a second core.
    if n == 1 or (n == 2 and options.device is DeviceKind.cpu):
        for bound in bounds:
            yield PlannedPlacement(next(groupings(load, 1)), Sampling.copy, n - 1, max_staleness=bound)
    for samplers in _splits(n):
        for groups, bound in product(groupings(load, n - samplers), bounds):
            for mesh in meshes(groups, load, options):
                yield PlannedPlacement(groups, Sampling.workers, samplers, mesh, max_staleness=bound)
            if servers:
                for width in widths(samplers, options):
                    even = (n - samplers) % _nodes(n - samplers, options) == 0  # as torchrun requires
                    # With a bound of 0 nothing overlaps, so rollout=sync does the same, and runs under torchrun.
                    strict = None if bound == 0 and len(groups) == 1 and even else bound
                    for mesh in meshes(groups, load, options):
                        yield PlannedPlacement(groups, Sampling.servers, samplers, mesh, width, strict)


def _splits(n: int) -> list[int]:
    """Return the numbers of devices that only sample."""
    if n <= SPLITS:
        return list(range(1, n))
    return sorted({round(n * part / SPLITS) for part in range(1, SPLITS)})


def widths(devices: int, options: PlanOptions) -> list[int]:
    """Return the powers of two that divide a number of devices and do not exceed a node."""
    powers, width = [], 1
    while width <= min(devices, options.devices_per_node, 8):
        if devices % width == 0 and options.devices_per_node % width == 0:
            powers.append(width)
        width *= 2
    return powers


def meshes(groups: Sequence[PlannedGroup], load: Workload, options: PlanOptions) -> list[PlannedMesh]:
    """Return the meshes that the launch accepts. Roles on separate devices only divide their weights.

    Ranks that compute a sequence or a layer together, or exchange tokens for experts, are in one node. Weights are
    replicated over nodes, over all ranks, or not at all. In a pipeline, each node has one stage or several.
    """
    possible = [PlannedMesh()] if len(groups) > 1 else _possible(groups[0].devices, options)
    return [
        mesh
        for mesh in possible
        if all(load.accepts(role, group.devices, tuple(vars(mesh).items())) for group in groups for role in group.roles)
    ]


def _possible(devices: int, options: PlanOptions) -> Iterator[PlannedMesh]:
    nodes = _nodes(devices, options)
    for context, tensor, expert in product(widths(devices, options), repeat=3):
        inside = context * tensor * expert
        if devices % inside or inside > options.devices_per_node:
            continue
        for copies in sorted({1, nodes, devices // inside}):
            if devices // inside % copies == 0:
                yield PlannedMesh(copies, context, tensor, expert)
        for stages in (nodes * width for width in widths(devices // nodes, options)):
            if stages > 1 and devices % (stages * inside) == 0:
                yield PlannedMesh(1, context, tensor, expert, stages)


def groupings(load: Workload, devices: int) -> Iterator[tuple[PlannedGroup, ...]]:
    """Yield ways to distribute roles over devices: together; each trained role apart; every role apart.

    Groups get devices in proportion to their operations, and at least one.
    """
    # The sampled role first: `PlannedPlacement.groups` promises it.
    roles = [load.sampled, *(role for role in load.roles if role != load.sampled)]
    trained = [role for role in roles if load.roles[role].trained or role == load.sampled]
    frozen = [role for role in roles if role not in trained]
    by_training = [(trained[0], *frozen), *((role,) for role in trained[1:])]
    choices: list[list[tuple[str, ...]]] = [[tuple(roles)], by_training, [(role,) for role in roles]]
    seen: set[tuple[tuple[str, ...], ...]] = set()
    for choice in choices:
        if tuple(choice) not in seen and len(choice) <= devices:
            seen.add(tuple(choice))
            yield _sized(load, choice, devices)


def _sized(load: Workload, choice: Sequence[tuple[str, ...]], devices: int) -> tuple[PlannedGroup, ...]:
    need = [
        sum(call.operations * load.roles[call.role].network.active for call in load.calls if call.role in roles)
        for roles in choice
    ]
    sizes = [1] * len(choice)
    for _ in range(devices - len(choice)):  # the group with the most operations per device gets the next one
        sizes[max(range(len(choice)), key=lambda i: need[i] / sizes[i])] += 1
    return tuple(PlannedGroup(roles, size) for roles, size in zip(choice, sizes, strict=True))


def overrides(placement: PlannedPlacement, load: Workload, options: PlanOptions, server: str) -> list[str]:
    """Return the overrides of a placement.

    Args:
        placement: the placement.
        load: work of the experiment.
        options: the cluster.
        server: word of the inference server.
    """
    words = _runtime_words(placement, options)
    roles = [role for group in placement.groups for role in group.roles if load.roles[role].configured]
    words += [
        f"models.{role}.sharding.{name}={size}"
        for role in roles
        for name, size in vars(placement.mesh).items()
        if size != getattr(load.roles[role].sharding, name)
    ]
    if placement.sampling is Sampling.servers:
        words += _server_words(placement, f"models.{load.sampled}.sampler", server)
    if placement.max_staleness is None:
        return [*words, "rollout=sync"]
    words += ["rollout=async", f"rollout.max_staleness={placement.max_staleness}"]
    if placement.max_staleness and not load.corrects_staleness and load.correction_key is not None:
        words.append(f"{load.correction_key}=importance_correction")
    return words


def _runtime_words(placement: PlannedPlacement, options: PlanOptions) -> list[str]:
    if placement.runtime != "ray":
        return ["runtime=local"]
    words = ["runtime=ray", *(["runtime.address=auto"] if options.nodes > 1 else [])]
    nodes: dict[str, str] = {}
    for group in placement.groups:
        nodes[group.roles[0]] = f"{{devices: {group.devices}}}"
        nodes |= dict.fromkeys(group.roles[1:], f"{{with: {group.roles[0]}}}")
    if placement.sampling is Sampling.workers:
        nodes["rollout"] = f"{{devices: {placement.samplers}}}"
    return [*words, f"runtime.placement={{{', '.join(f'{role}: {node}' for role, node in nodes.items())}}}"]


def _server_words(placement: PlannedPlacement, key: str, server: str) -> list[str]:
    words = [f"{key}={server}", f"{key}.servers={placement.samplers // placement.server_parallel}"]
    if placement.server_parallel > 1:
        words.append(f"{key}.arguments='{LAUNCHERS[server]} {placement.server_parallel}'")
    return words


def launcher(placement: PlannedPlacement, options: PlanOptions) -> list[str]:
    """Return the program that starts a run with a placement."""
    if placement.runtime != "torchrun":
        return ["realign"]
    nodes = _nodes(placement.trainers, options)
    processes = placement.trainers // nodes
    several = [f"--nnodes={nodes}"] if nodes > 1 else ["--standalone"]
    return ["torchrun", *several, f"--nproc-per-node={processes}", "-m", "realign"]


def _nodes(devices: int, options: PlanOptions) -> int:
    """Return the number of nodes that have so many devices."""
    return -(-devices // options.devices_per_node)


def notes(placement: PlannedPlacement, load: Workload, options: PlanOptions) -> list[str]:
    """Return what the overrides of a placement do not contain."""
    texts = []
    if placement.sampling is Sampling.servers:
        texts.append("The overrides assign no devices to servers. Start them with CUDA_VISIBLE_DEVICES, and set urls.")
        if options.nodes > 1:
            texts.append("Servers on other nodes need urls and weights_dir.")
    if placement.runtime == "torchrun" and options.nodes > 1:
        texts.append("Run torchrun on every node, with --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT.")
    if placement.max_staleness and not load.corrects_staleness and load.correction_key is None:
        texts.append("The objective does not correct for stale samples.")
    return texts

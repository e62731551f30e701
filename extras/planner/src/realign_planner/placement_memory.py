"""Memory of a placement per device: that of `realign check`, for each group of roles and for what samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from realign_planner.internals import CACHE_BYTES, FP32, ROLLOUT, DeviceEstimate, MemoryModel, MemoryWork, RoleMemory
from realign_planner.options import Device
from realign_planner.placements import PlannedGroup, PlannedPlacement, Sampling
from realign_planner.simulator import NetworkSizes
from realign_planner.workload import RoleLoad, Workload


def memory_of(placement: PlannedPlacement, load: Workload, device: Device) -> Mapping[str, float]:
    """Return the largest number of bytes on a device of each group, of rollout workers and of servers, by name."""
    peaks: dict[str, float] = {}
    for group in placement.groups:
        works = {role: _work(load.roles[role], group, placement, load, device) for role in group.roles}
        copies = placement.sampling is Sampling.copy and load.sampled in group.roles
        ahead = {ROLLOUT: _sampler(load, device)} if copies else {}
        # The first choice of the `auto` settings with which the group fits; the last one if none does.
        for choice in _choices(group, placement, load, device):
            estimates = {role: choice[role].estimate(work) for role, work in works.items()}
            peak = DeviceEstimate("", estimates | ahead).peak
            if peak <= _limit(device):
                break
        peaks[group.roles[0]] = peak
    if placement.sampling is Sampling.workers:
        peaks[ROLLOUT] = DeviceEstimate("", {ROLLOUT: _sampler(load, device)}).peak
    elif placement.sampling is Sampling.servers:
        network = load.roles[load.sampled].network
        weights = network.number_bytes * network.weights / placement.server_parallel
        longest = load.longest_prompt + load.work.lengths.most
        # Servers fill the rest of their memory with cache, which must hold one sequence.
        peaks["servers"] = max(_limit(device), weights + network.bytes_per_token * longest / placement.server_parallel)
    return peaks


def _choices(
    group: PlannedGroup, placement: PlannedPlacement, load: Workload, device: Device
) -> Iterator[dict[str, MemoryModel]]:
    """Yield the models of a group for what `auto` may mean, those that take least time first."""
    models = {role: placement.meshed(load.roles[role].model) for role in group.roles}
    yield models
    if device.sizes_cache:  # a CPU decides nothing
        autos = {role: load.roles[role].auto for role in models}
        models = {role: replace(m, keep_rollout=m.keep_rollout and not autos[role].keeps) for role, m in models.items()}
        yield models
        yield {
            role: replace(m, gradient_checkpointing=m.gradient_checkpointing or autos[role].checkpoints)
            for role, m in models.items()
        }


def _work(
    role: RoleLoad, group: PlannedGroup, placement: PlannedPlacement, load: Workload, device: Device
) -> MemoryWork:
    """Return the largest calls of a role on one rank."""
    calls = [call for call in load.calls if call.role == role.name]
    ranks = placement.data_ranks(group)
    parts = min((call.minibatches for call in calls if call.optimizer_steps), default=1) * ranks
    return MemoryWork(
        trains=any(call.optimizer_steps for call in calls),
        scores=any(not call.optimizer_steps for call in calls),
        samples=placement.sampling is Sampling.trainer and role.name == load.sampled,
        tokens=math.ceil(load.tokens_per_pass(ranks)),
        optimizer_step_tokens=math.ceil(load.tokens / parts),
        prompts=math.ceil(load.work.batch_prompts / ranks),
        sequences=math.ceil(load.sequences / ranks),
        prompt=math.ceil(load.longest_prompt),
        response=load.longest_response,
        ranks=group.devices,
        free=round(_limit(device)) if device.sizes_cache else None,
    )


def _sampler(load: Workload, device: Device) -> RoleMemory:
    """Return the memory of a copy of the sampled model that only samples."""
    work = MemoryWork(
        trains=False,
        scores=False,
        samples=True,
        tokens=0,
        optimizer_step_tokens=0,
        prompts=load.work.batch_prompts,
        sequences=load.sequences,
        prompt=math.ceil(load.longest_prompt),
        response=load.longest_response,
        free=round(_limit(device)) if device.sizes_cache else None,
    )
    return load.roles[load.sampled].model.estimate(work)


def in_process_slots(network: NetworkSizes, load: Workload, device: Device) -> int:
    """Return the slots of the in-process sampler. A slot contains the longest prompt and the longest response."""
    slot = network.bytes_per_token * (load.longest_prompt + load.work.lengths.most)
    memory: float = CACHE_BYTES
    if device.sizes_cache:
        memory = load.cache_fraction * (_limit(device) - FP32 * network.weights)
    fitting = max(1, int(memory / slot)) if load.max_slots is None else load.max_slots
    return min(fitting, load.sequences)


def _limit(device: Device) -> float:
    return device.assumed.memory_used * device.accelerator.memory


def fits(memory: Mapping[str, float], device: Device) -> bool:
    """Return whether all devices have enough memory."""
    return all(peak <= _limit(device) for peak in memory.values())


__all__ = ["fits", "in_process_slots", "memory_of"]

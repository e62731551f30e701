"""Memory of a placement per device, in bytes: weights, optimizer state, activations and KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from realign.engines.sampling.decode import CACHE_BYTES
from realign.planning.options import Device
from realign.planning.placements import PlannedGroup, PlannedPlacement, Sampling
from realign.planning.simulator import NetworkSizes
from realign.planning.workload import RoleLoad, Workload

WEIGHT_BYTES = 4
"""Bytes of a stored weight: weights are fp32."""
TRAINING_BYTES = 12
"""Bytes of the gradient and of both moments of AdamW of a weight."""
ACTIVATION_NUMBERS = 34
"""Numbers per token, layer and hidden unit that a backward pass needs (arXiv:2205.05198, half of 34 bytes in bf16,
doubled for the gated MLP and for temporary tensors)."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device."""

    weights: float = 0.0
    """Weights, including gathered and concatenated copies."""
    training: float = 0.0
    """Gradients and optimizer state."""
    activations: float = 0.0
    cache: float = 0.0
    """KV cache."""

    @property
    def total(self) -> float:
        """Return the sum."""
        return self.weights + self.training + self.activations + self.cache


def memory_of(placement: PlannedPlacement, load: Workload, device: Device) -> Mapping[str, DeviceMemory]:
    """Return the memory of a device of each group, of rollout workers and of servers, by name."""
    memory = {}
    in_process = placement.sampling in (Sampling.trainer, Sampling.copy)
    for group in placement.groups:
        samples = in_process and load.sampled in group.roles
        memory[group.roles[0]] = _group(group, placement, load, device, samples=samples)
    network = load.roles[load.sampled].network
    if placement.sampling is Sampling.workers:
        memory["rollout"] = _sampler(load.roles[load.sampled], 1, load, device)  # each worker has a whole copy
    elif placement.sampling is Sampling.servers:
        weights = network.number_bytes * network.weights / placement.server_parallel
        longest = load.longest_prompt + load.work.lengths.most
        least = network.bytes_per_token * longest / placement.server_parallel
        room = device.assumed.memory_used * device.accelerator.memory - weights
        memory["servers"] = DeviceMemory(weights=weights, cache=max(room, least))
    return memory


def _group(
    group: PlannedGroup, placement: PlannedPlacement, load: Workload, device: Device, *, samples: bool
) -> DeviceMemory:
    """Return the memory of a device that has slices of the models of some roles."""
    weights = training = activations = cache = 0.0
    for name in group.roles:
        role = load.roles[name]
        weights += WEIGHT_BYTES * role.network.weights / group.devices
        training += TRAINING_BYTES * role.trained * role.network.weights / group.devices
        activations = max(activations, _activations(role, placement, group, load))
        if group.devices > 1:  # one gathered layer, and the next one
            weights += 2 * WEIGHT_BYTES * role.network.weights / role.network.layers / placement.tensor_parallel
    if samples:
        sampler = _sampler(load.roles[load.sampled], group.devices, load, device)
        shared = WEIGHT_BYTES * load.roles[load.sampled].network.weights / group.devices
        weights += sampler.weights - (shared if placement.sampling is Sampling.trainer else 0.0)
        cache = sampler.cache
    return DeviceMemory(weights, training, activations, cache)


def _sampler(role: RoleLoad, devices: int, load: Workload, device: Device) -> DeviceMemory:
    """Return the memory of the in-process sampler: its slice, the gathered weights, and concatenated copies."""
    n = role.network.weights
    gathered = WEIGHT_BYTES * n if devices > 1 else 0.0
    fused = role.network.number_bytes * n if role.fused else 0.0
    cache = cache_bytes(role.network, load, device)
    return DeviceMemory(weights=WEIGHT_BYTES * n / devices + gathered + fused, cache=cache)


def cache_bytes(network: NetworkSizes, load: Workload, device: Device) -> float:
    """Return the size of the KV cache of the in-process sampler."""
    slot = network.bytes_per_token * (load.longest_prompt + load.work.lengths.most)
    return slot * in_process_slots(network, load, device)


def in_process_slots(network: NetworkSizes, load: Workload, device: Device) -> int:
    """Return the slots of the in-process sampler. A slot contains the longest prompt and the longest response."""
    slot = network.bytes_per_token * (load.longest_prompt + load.work.lengths.most)
    memory: float = CACHE_BYTES
    if device.sizes_cache:
        free = device.assumed.memory_used * device.accelerator.memory - WEIGHT_BYTES * network.weights
        memory = load.cache_fraction * free
    fitting = max(1, int(memory / slot)) if load.max_slots is None else load.max_slots
    return min(fitting, load.sequences)


def _activations(role: RoleLoad, placement: PlannedPlacement, group: PlannedGroup, load: Workload) -> float:
    """Return the activations of one micro-batch; a frozen model needs those of one layer."""
    network = role.network
    ranks = max(1, group.devices // placement.tensor_parallel)
    tokens = min(load.budget, load.tokens / ranks)
    layer = ACTIVATION_NUMBERS * network.hidden * network.number_bytes * tokens / placement.tensor_parallel
    if not role.trained:
        return layer
    if role.checkpointing:
        return layer + network.layers * network.hidden * network.number_bytes * tokens
    return layer * network.layers


def fits(memory: Mapping[str, DeviceMemory], device: Device) -> bool:
    """Return whether all devices have enough memory."""
    limit = device.assumed.memory_used * device.accelerator.memory
    # The cache of servers fills the limit exactly, up to rounding.
    return all(device_memory.total <= limit * (1 + 1e-9) for device_memory in memory.values())

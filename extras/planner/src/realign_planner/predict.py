"""Predict step time, throughput and memory of a placement by simulation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from realign_planner.options import Device, PlanOptions
from realign_planner.placement_memory import fits, in_process_slots, memory_of
from realign_planner.placements import PlannedGroup, PlannedPlacement, Sampling
from realign_planner.simulator import Costs, RuntimeSchedule, Work, decoding, rows_that_fit, simulate
from realign_planner.traffic import Traffic, traffic
from realign_planner.workload import CallLoad, Workload

ROUNDS = 2
"""Number of simulated groups of `max_staleness + 1` steps with a full pipeline. Waits for old prompts recur so."""
LEAST_STEPS = 4
"""Least number of simulated steps with a full pipeline."""
WEIGHT_BYTES = 4
"""Bytes of a stored weight: weights are fp32."""
GATHERS = {True: 3, False: 1}
"""Transfers of each sharded layer per micro-batch: in training, also for the backward pass and for gradients."""
# Four fp32 numbers are read and three written: 7 times 4 bytes.
OPTIMIZER_BYTES = 28
"""Bytes that an optimizer step of AdamW reads and writes per weight: weight, gradient and both moments."""


@dataclass(frozen=True)
class Scale:
    """Factors by which measured costs differ from the analytic costs."""

    decode_step: float = 1.0
    decode_row: float = 1.0
    decode_context: float = 1.0
    prefill_token: float = 1.0
    train_step: float = 1.0
    train_token: float = 1.0

    def of_sampling(self, costs: Costs) -> Costs:
        """Return the costs with the factors of sampling."""
        return replace(
            costs,
            decode_step_s=costs.decode_step_s * self.decode_step,
            decode_row_s=costs.decode_row_s * self.decode_row,
            decode_context_s=costs.decode_context_s * self.decode_context,
            prefill_token_s=costs.prefill_token_s * self.prefill_token,
        )

    def of_training(self, costs: Costs) -> Costs:
        """Return the costs with the factors of training."""
        return replace(
            costs,
            train_step_s=costs.train_step_s * self.train_step,
            train_token_s=costs.train_token_s * self.train_token,
        )


@dataclass(frozen=True)
class Cluster:
    """Devices of a plan, and the factors of their costs."""

    options: PlanOptions
    device: Device
    scale: Scale = Scale()


@dataclass(frozen=True)
class Prediction:
    """Predicted behavior of a placement."""

    placement: PlannedPlacement
    step_s: float
    tokens_per_s: float
    """Trained response tokens per second."""
    staleness: float
    """Mean staleness of trained prompts."""
    memory: Mapping[str, float]
    """Peak bytes on a device, by group."""
    traffic: float
    """Bytes that a rank of the sampled role's group sends in a step, for all roles of the group."""
    fits: bool


def predict(placement: PlannedPlacement, load: Workload, cluster: Cluster) -> Prediction:
    """Simulate a placement."""
    bound = placement.max_staleness or 0
    # One warm-up step, and `bound` steps each to fill and to empty the pipeline, which `full_steps` leaves out.
    steps = max(LEAST_STEPS, ROUNDS * (bound + 1)) + 1 + 2 * bound
    costs, plan = costs_of(placement, load, cluster), schedule(placement, load, cluster)
    report = simulate(costs, with_steps(load.work, steps), plan)
    memory = memory_of(placement, load, cluster.device)
    return Prediction(
        placement,
        report.step_s,
        report.tokens_per_s,
        report.staleness()["head"],
        memory,
        step_traffic(placement, load),
        fits(memory, cluster.device),
    )


def with_steps(work: Work, steps: int) -> Work:
    """Return the work of a run with a number of steps."""
    return replace(work, steps=steps)


def schedule(placement: PlannedPlacement, load: Workload, cluster: Cluster) -> RuntimeSchedule:
    """Return the schedule that the simulator executes."""
    return RuntimeSchedule(
        max_staleness=placement.max_staleness,
        engines=engines(placement),
        slots=slots(placement, load, cluster),
        shared=placement.sampling is Sampling.copy and not placement.samplers,
    )


def engines(placement: PlannedPlacement) -> int:
    """Return the number of engines that sample."""
    if placement.sampling is Sampling.trainer:
        return max(1, placement.groups[0].devices // placement.mesh.tensor)
    return max(1, placement.samplers // placement.server_parallel)


def slots(placement: PlannedPlacement, load: Workload, cluster: Cluster) -> int:
    """Return the number of rows of an engine."""
    network = load.roles[load.sampled].network
    if placement.sampling is not Sampling.servers:
        return in_process_slots(network, load, cluster.device)
    device, width = cluster.device, placement.server_parallel
    # Servers hold the weights in the dtype of their products, and divide them over their devices.
    free = device.assumed.memory_used * device.accelerator.memory * width - network.number_bytes * network.weights
    return rows_that_fit(free, network, device.assumed, load.work)


def costs_of(placement: PlannedPlacement, load: Workload, cluster: Cluster) -> Costs:
    """Return the costs of a placement: analytic costs times the measured factors."""
    sampling = sampling_costs(placement, load, cluster)
    training = cluster.scale.of_training(training_costs(placement, load, cluster))
    if placement.sampling is not Sampling.servers:  # the factors are those of the in-process sampler
        sampling = cluster.scale.of_sampling(sampling)
    return replace(
        sampling,
        train_step_s=training.train_step_s + collectives_s(placement, load, cluster),
        train_token_s=training.train_token_s,
        sync_s=update_s(placement, load, cluster),
    )


def sampling_costs(placement: PlannedPlacement, load: Workload, cluster: Cluster) -> Costs:
    """Return the analytic costs of an engine."""
    network, assumed = load.roles[load.sampled].network, cluster.device.assumed
    costs = decoding(network, cluster.device.accelerator, assumed, placement.server_parallel)
    if placement.sampling is Sampling.servers:
        return costs
    return replace(costs, decode_step_s=costs.decode_step_s + assumed.in_process_layer_s * network.layers)


def update_s(placement: PlannedPlacement, load: Workload, cluster: Cluster) -> float:
    """Return the seconds of a weight update."""
    assumed, network = cluster.device.assumed, load.roles[load.sampled].network
    if placement.sampling is Sampling.trainer:
        # The sampler uses the trained weights themselves.
        if placement.groups[0].devices == 1:
            return 0.0
        return WEIGHT_BYTES * network.weights / (_link(placement.groups[0], cluster) * assumed.link_used)
    if placement.sampling is Sampling.copy:
        return WEIGHT_BYTES * network.weights / (cluster.device.accelerator.bandwidth * assumed.bandwidth_used)
    size = network.number_bytes if placement.sampling is Sampling.servers else WEIGHT_BYTES
    return assumed.sync_call_s + size * network.weights / assumed.host_rate


def _link(group: PlannedGroup, cluster: Cluster) -> float:
    device = cluster.device.accelerator
    return device.node_link if group.devices <= cluster.options.devices_per_node else device.link


def training_costs(placement: PlannedPlacement, load: Workload, cluster: Cluster) -> Costs:
    """Return the analytic costs of all calls after sampling.

    A call starts when the calls that it depends on have ended, and when its devices are free.
    """
    assumed = cluster.device.assumed
    proximal = _needs_proximal(placement, load)
    group_of = {role: group for group in placement.groups for role in group.roles}
    ends: dict[str, float] = {}
    free: dict[str, float] = {}
    fixed = assumed.train_call_s
    for call in load.calls:
        group = group_of[call.role]
        start = max([free.get(group.roles[0], 0.0), *(ends.get(name, 0.0) for name in call.after)])
        seconds = token_s(call, group, placement, load, cluster)
        if proximal and call.optimizer_steps and call.role == load.sampled:
            forward = CallLoad("proximal", call.role, assumed.proximal)
            seconds += token_s(forward, group, placement, load, cluster)
        ends[call.name] = free[group.roles[0]] = start + seconds
        role = load.roles[call.role]
        trained = call.optimizer_steps * role.trained * role.network.weights
        fixed += OPTIMIZER_BYTES * trained / (group.devices * cluster.device.accelerator.bandwidth)
    return Costs(0.0, train_step_s=fixed, train_token_s=max(ends.values(), default=0.0))


def collectives_s(placement: PlannedPlacement, load: Workload, cluster: Cluster) -> float:
    """Return the seconds of a step for starting the collectives of sharded models.

    Runs in one process do not measure them, so that no factor applies.
    """
    collectives = 0.0
    for call in load.calls:
        group = next(group for group in placement.groups if call.role in group.roles)
        if group.devices > 1:
            collectives += (
                GATHERS[call.optimizer_steps > 0]
                * microbatches(call, group, placement, load)
                * call.minibatches
                * call.epochs
                * load.roles[call.role].network.layers
                / placement.mesh.pipeline
            )
    return collectives * cluster.device.assumed.collective_s


def _needs_proximal(placement: PlannedPlacement, load: Workload) -> bool:
    """Return whether the overrides of the placement add a correction, which recomputes log-probs."""
    return bool(placement.max_staleness) and not load.corrects_staleness


def microbatches(call: CallLoad, group: PlannedGroup, placement: PlannedPlacement, load: Workload) -> int:
    """Return the number of micro-batches of a rank in an optimizer step, or of the batch in a call without one."""
    parts = placement.data_ranks(group) * call.minibatches
    return math.ceil(load.tokens / parts / load.tokens_per_pass(parts))


def pass_traffic(call: CallLoad, group: PlannedGroup, placement: PlannedPlacement, load: Workload) -> Traffic:
    """Return the bytes that a rank of a group sends in a micro-batch of a call."""
    if group.devices == 1:
        return Traffic()
    role = load.roles[call.role]
    # `auto` recomputes where memory is scarce, which is where ranks compute a sequence together
    checkpoints = role.model.gradient_checkpointing or role.auto.checkpoints
    model = replace(placement.meshed(role.model), gradient_checkpointing=checkpoints)
    tokens = load.tokens_per_pass(placement.data_ranks(group) * call.minibatches)
    return traffic(model, group.devices, tokens, trains=call.optimizer_steps > 0)


def step_traffic(placement: PlannedPlacement, load: Workload) -> float:
    """Return the bytes that a rank of the first group sends in a step."""
    group = placement.groups[0]
    total = 0.0
    for call in load.calls:
        if call.role in group.roles:
            sent = sum(vars(pass_traffic(call, group, placement, load)).values())
            total += sent * microbatches(call, group, placement, load) * call.minibatches * call.epochs
    return total


def token_s(
    call: CallLoad, group: PlannedGroup, placement: PlannedPlacement, load: Workload, cluster: Cluster
) -> float:
    """Return the seconds per packed token of a call on a group of devices.

    Transfers of weights and gradients overlap with the computation, so that the longer of both counts. Those within
    layers (context, tensor, expert) do not. The stages of a pipeline wait for the first and the last micro-batch.
    """
    device, assumed, mesh = cluster.device.accelerator, cluster.device.assumed, placement.mesh
    compute_s = call.operations * load.roles[call.role].network.active / (device.flops * assumed.flops_used)
    if group.devices == 1:
        return compute_s
    ranks, sent = placement.data_ranks(group), pass_traffic(call, group, placement, load)
    tokens = load.tokens_per_pass(ranks * call.minibatches) / call.epochs

    def seconds(size: float, span: int) -> float:
        """Return the seconds of a transfer among ranks of which the farthest are `span` ranks apart."""
        link = device.node_link if span <= cluster.options.devices_per_node else device.link
        return size / (link * assumed.link_used * tokens)

    together, stage = mesh.context * mesh.tensor, group.devices // mesh.pipeline
    weights_s = seconds(sent.shard, stage // mesh.replicate) + seconds(sent.replicate, stage)
    inside_s = seconds(sent.context, together) + seconds(sent.tensor, mesh.tensor)
    inside_s += seconds(sent.expert, together * mesh.expert)
    inside_s += seconds(sent.pipeline, group.devices) if mesh.pipeline > 1 else 0.0
    passes = microbatches(call, group, placement, load)  # the pipeline fills and drains in each optimizer step
    waits = (passes + mesh.pipeline - 1) / passes
    return waits * (max(compute_s / (together * mesh.pipeline), weights_s) + inside_s) / ranks


__all__ = ["Cluster", "Prediction", "Scale", "costs_of", "predict"]

"""Estimate the memory of each role and device from the config, before any weights are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch

from realign.api.memory import EstimatesMemory, LimitsPrompts, LimitsSequences, MemoryWork, RoleMemory
from realign.api.model import ModelSpec
from realign.api.sampler import samples_externally
from realign.engines.shared_model import Share, SharedModel
from realign.models.device import free_bytes, pick_device
from realign.ranks import expected_size
from realign.runtime.experiment import Experiment
from realign.runtime.processes.placement import ROLLOUT, plan_groups

CPU = "cpu"
MEMINFO = Path("/proc/meminfo")

ASSUMED_PROMPT = 512
"""Length of the longest prompt, in tokens, if the config does not limit it."""
Free: TypeAlias = Callable[[torch.device], int | None]
"""Returns the free memory of a device in bytes, see `free_memory`."""


@dataclass(frozen=True)
class DeviceEstimate:
    """The roles on one device.

    Attributes:
        device: device, such as `cpu` or `cuda:0`.
        roles: memory of each role that has weights there; `rollout` is the copy that samples asynchronously.
        offloaded: roles whose weights are on the device only during their calls.
        processes: number of processes that use this device.
        free: free memory in bytes; None if unknown.
    """

    device: str
    roles: Mapping[str, RoleMemory]
    offloaded: frozenset[str] = frozenset()
    processes: int = 1
    free: int | None = None

    @property
    def kept(self) -> int:
        """Bytes between calls, in all processes."""
        return self.processes * sum(role.kept for name, role in self.roles.items() if name not in self.offloaded)

    @property
    def peak(self) -> int:
        """Largest number of bytes at any time, in all processes."""
        calls = [self.during(name, role.passing) for name, role in self.roles.items() if name != ROLLOUT]
        return max(calls, default=self.kept + self.processes * self._ahead)

    def during(self, role: str, passing: int) -> int:
        """Return the bytes, in all processes, during a call of a role that needs `passing` bytes in each."""
        own = self.roles[role].kept if role in self.offloaded else 0
        return self.kept + self.processes * (passing + own + self._ahead)

    @property
    def _ahead(self) -> int:
        """Bytes of asynchronous rollout, which runs during all other calls."""
        return self.roles[ROLLOUT].passing if ROLLOUT in self.roles else 0

    @property
    def holds_weights(self) -> bool:
        """Whether weights and optimizer state fit into the free memory."""
        return self.free is None or self.kept <= self.free

    def problems(self) -> Iterator[str]:
        """Yield a message if the roles do not fit into the free memory."""
        if self.free is None or self.peak <= self.free:
            return
        if not self.holds_weights:
            yield (
                f"{self.device}: weights and optimizer state need {show(self.kept)}, but {show(self.free)} are free. "
                "Use a smaller model, more devices, or models.ROLE.trains=lora."
            )
            return
        name, role = max(self.roles.items(), key=lambda item: item[1].passing)
        what, cure = _largest_call(role)
        yield (
            f"{self.device}: the peak is {show(self.peak)} in {what} of {name}, but {show(self.free)} are free. {cure}"
        )


def _largest_call(role: RoleMemory) -> tuple[str, str]:
    # `passing` is the maximum of these, so equality finds the call that needs it
    if role.rollout == role.passing:
        return "rollouts", "Lower sampler.max_slots of this model."
    if role.training == role.passing and role.gradients > role.activations:
        return "training", "Train fewer weights, for example with trains=lora, or use more devices."
    if role.training == role.passing:
        return "training", "Lower microbatch.max_tokens_per_microbatch, or set gradient_checkpointing=true."
    return "scoring", "Lower microbatch.max_tokens_per_microbatch."


def show(count: int) -> str:
    """Return a number of bytes in a readable unit."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"


def free_memory(device: torch.device) -> int | None:
    """Return the free memory of a device, or of the host for the CPU; None if unknown."""
    if device.type == "cuda":
        return free_bytes(device)
    try:
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kibibytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kibibytes[0]) * 1024 if kibibytes else None


def estimate(experiment: Experiment, longest: int | None = None, free: Free | None = None) -> list[DeviceEstimate]:
    """Return the memory of each device of the run. Roles whose spec estimates nothing are left out.

    Args:
        experiment: the experiment.
        longest: length of the longest prompt of the data in tokens, or of its longest row if nothing is sampled; None
            assumes the limits of the config.
        free: returns the free memory of a device; None: `free_memory`.

    Raises:
        RealignError: the config of a model cannot be read.
    """
    free = free or free_memory
    if experiment.runtime.starts_workers:
        groups = plan_groups(experiment)
        return _on_one_host(
            [
                device
                for group in groups
                for device in _devices(
                    _roles(experiment, group.roles, group.devices, longest, free), group.devices, free, group.offload
                )
            ]
        )
    ranks = expected_size()
    held = (*experiment.roles, ROLLOUT) if experiment.rollout.ahead else experiment.roles
    # a cached reference is freed once it has scored the rows
    freed = frozenset(experiment.cached_roles)
    return _devices(_roles(experiment, held, ranks, longest, free), ranks, free, freed)


def _on_one_host(devices: list[DeviceEstimate]) -> list[DeviceEstimate]:
    """Subtract the memory of other worker groups on the CPU. On CUDA, every process has its own GPU."""
    used = sum(device.peak for device in devices if device.device == CPU)
    return [
        replace(device, free=device.free - (used - device.peak))
        if device.device == CPU and device.free is not None
        else device
        for device in devices
    ]


def _devices(
    roles: Mapping[str, RoleMemory], processes: int, free: Free, offloaded: frozenset[str] = frozenset()
) -> list[DeviceEstimate]:
    names = dict.fromkeys(role.device for role in roles.values())
    return [
        DeviceEstimate(
            name,
            {role: memory for role, memory in roles.items() if memory.device == name},
            offloaded & roles.keys(),
            # all processes share the memory of the host, but on CUDA each has a GPU of its own
            processes if name == CPU else 1,
            free(torch.device(name)),
        )
        for name in names
    ]


def _roles(
    experiment: Experiment, roles: Iterable[str], ranks: int, longest: int | None, free: Free
) -> dict[str, RoleMemory]:
    """Return the memory of each role that has weights; `rollout` is a copy of the first role that is sampled."""
    ahead = experiment.sampled_roles if experiment.rollout.ahead else []
    memory: dict[str, RoleMemory] = {}
    for role in roles:
        source = ahead[0] if role == ROLLOUT and ahead else role
        spec = experiment.models.get(source)
        if not isinstance(spec, EstimatesMemory) or (role == ROLLOUT and samples_externally(spec)):
            continue
        work = work_of(experiment, source, ranks, longest)
        if role == ROLLOUT:
            work = replace(work, trains=False, scores=False, samples=True, references=(), ranks=1)
        elif source in ahead:
            # its copy samples instead, and is counted as `rollout`
            work = replace(work, samples=False)
        memory[role] = spec.memory(source, replace(work, free=free(device_of(spec))))
    return memory


def work_of(experiment: Experiment, role: str, ranks: int = 1, longest: int | None = None) -> MemoryWork:
    """Return the work of a role and of all roles that share its model; see `estimate` for `longest`."""
    shared = {name: spec for name, spec in experiment.models.items() if isinstance(spec, SharedModel)}
    views = [name for name, spec in shared.items() if spec.of == role and name in experiment.roles]
    methods = {rpc.method for rpc in experiment.graph.rpcs if rpc.model in (role, *views)}
    evaluated = any(evaluation.role == role for evaluation in experiment.all_evaluations.values())
    response = experiment.longest_response
    prompt = longest if response and longest is not None else longest_prompt(experiment)
    plans = [experiment.interfaces[rpc.model].plan() for rpc in experiment.graph.rpcs if rpc.method == "generate"]
    group = max((plan.responses_per_prompt or 1 for plan in plans), default=1)
    steps = [experiment.interfaces[role].plan().n_minibatches] if role in experiment.interfaces else []
    sequence = prompt + response if response else _longest_row(experiment, longest)
    step_tokens = experiment.batch_prompts * (group if response else 1) * sequence
    limit = experiment.microbatch.max_tokens_per_microbatch
    of_step = -(-step_tokens // max([1, *steps]))
    return MemoryWork(
        trains="train_step" in methods,
        scores=bool(methods & {"inference", "credit"}) or evaluated,
        samples=("generate" in methods or evaluated) and not samples_externally(experiment.models[role]),
        tokens=of_step if limit is None else min(limit, of_step),
        optimizer_step_tokens=of_step,
        prompts=experiment.prompts_at_once,
        sequences=experiment.prompts_at_once * group,
        prompt=prompt,
        response=response,
        sequence=sequence,
        references=tuple(shared[v].layers for v in views if shared[v].branch is Share.reference),
        ranks=ranks,
    )


def _longest_row(experiment: Experiment, longest: int | None) -> int:
    """Return the largest number of tokens of a row, if nothing is sampled."""
    row = experiment.data.max_tokens if isinstance(experiment.data, LimitsSequences) else None
    return longest or row or experiment.microbatch.max_tokens_per_microbatch or ASSUMED_PROMPT


def longest_prompt(experiment: Experiment) -> int:
    """Return the limit for prompts in the config, or `ASSUMED_PROMPT`."""
    limited = experiment.data.max_prompt_tokens if isinstance(experiment.data, LimitsPrompts) else None
    return limited or ASSUMED_PROMPT


def device_of(spec: ModelSpec) -> torch.device:
    """Return the device of a model spec."""
    return pick_device(spec.facts().device or "auto")


__all__ = ["ASSUMED_PROMPT", "DeviceEstimate", "estimate", "free_memory", "longest_prompt", "show", "work_of"]

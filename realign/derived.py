"""The table that a run prints at launch: what the config amounts to, in prompts, sequences, tokens and steps."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from realign.api import GenerationConfig, ModelInterface
from realign.api.sampler import ConfiguresSampler
from realign.engines.shared import shared_roles
from realign.runtime import Experiment
from realign.runtime.backend import Backend
from realign.runtime.placement import plan_groups
from realign.runtime.rollout import RolloutMode

OPTIMIZER_STEPS = "optimizer steps per step"
IDLE_STEPS = "steps before the first update"
OF_TRAINING = {OPTIMIZER_STEPS, "prompts per optimizer step", "loss"}
"""Rows that are left out for a role that the graph does not train, such as the reward model of PPO."""


def derived_rows(experiment: Experiment) -> list[tuple[str, str]]:
    """Name and value of each row.

    What only the algorithm knows comes from the optional method `describe(batch_prompts) -> dict[str, str]` of each
    role's interface; its row `optimizer steps per step`, when it starts with a number, is added up over the run, but
    for the number of steps that its row `steps before the first update` starts with.
    """
    e = experiment
    rows = {"steps": f"{e.steps:,}", "prompts per step": f"{e.batch_prompts:,}"}
    roles = list(dict.fromkeys(rpc.model for rpc in e.graph.rpcs))
    for role in roles:
        rows |= _sampling_rows(e, role)
    described = {role: _describe(e.interfaces[role], e.batch_prompts) for role in roles}
    untrained = set(roles) - {rpc.model for rpc in e.graph.rpcs if rpc.method == "train_step"}
    for role in untrained:
        described[role] = {name: value for name, value in described[role].items() if name not in OF_TRAINING}
    several = sum(map(bool, described.values())) > 1
    for role, own in described.items():
        rows |= {f"{role}: {name}" if several else name: value for name, value in own.items()}
        if match := re.match(r"\d+", own.get(OPTIMIZER_STEPS, "")):
            idle_steps = int(own.get(IDLE_STEPS, "0").split()[0])
            total = f"{int(match[0]) * max(0, e.steps - idle_steps):,}"
            rows[f"{role}: optimizer steps in all" if several else "optimizer steps in all"] = total
    if e.rollout.mode is RolloutMode.async_:
        rows["responses are sampled"] = e.rollout.describe()
    if e.dynamic_sampling is not None:
        rows["dynamic sampling"] = (
            f"groups with {e.dynamic_sampling.describe()}, out of up to {e.dynamic_sampling.max_batches} batches of "
            f"{e.prompts_at_once:,} prompts"
        )
    limit = e.microbatch.max_tokens_per_microbatch
    rows["tokens per micro-batch"] = "no limit" if limit is None else f"at most {limit:,}"
    if found := e.temperatures:
        rows["temperature"] = f"{next(iter(found.values())):g} ({', '.join(found)})"
    if e.evaluation is not None:
        rows["evaluation"] = f"every {e.evaluation.every_steps} steps, before and after; {e.evaluation.describe()}"
    rows["checkpoints"] = "none" if e.checkpoint is None else e.checkpoint.describe()
    if e.calibration is not None:
        rows["reward calibration"] = e.calibration.describe()
    if e.runtime.kind is Backend.ray:
        rows["worker processes"] = "; ".join(group.describe() for group in plan_groups(e))
    rows |= _external_rows(e)
    if shared := shared_roles(e.models):
        rows["roles that share a model"] = "; ".join(f"{role}: {what}" for role, what in shared.items())
    if e.graph.sync:
        rows["weights after a step"] = "; ".join(f"{role}: {sync.describe()}" for role, sync in e.graph.sync.items())
    rows["written but unread keys"] = ", ".join(e.graph.unread()) or "none"
    idle = [f"interfaces.{r}" for r in e.interfaces if r not in roles]
    idle += [f"models.{r}" for r in e.models if r not in e.roles]
    idle += [f"models.{r}.optimizer" for r in e.models if r in untrained and getattr(e.models[r], "optimizer", None)]
    rows["config keys never read"] = ", ".join(idle) or "none"
    return list(rows.items())


def _external_rows(experiment: Experiment) -> dict[str, str]:
    """What does not hold for samplers that are not bitwise reproducible; nothing for samplers that are."""
    found: dict[str, str] = {}
    for role in experiment.roles:
        spec = experiment.models.get(role)
        if isinstance(spec, ConfiguresSampler) and not spec.sampler.capabilities().bitwise:
            found[role] = type(spec.sampler).__name__
    if not found:
        return {}
    names = ", ".join(f"{name} ({role})" for role, name in found.items())
    return {
        "samplers that are not bitwise": f"{names}: micro-batches, ranks, restarts and staleness can change the results"
    }


def _sampling_rows(experiment: Experiment, role: str) -> dict[str, str]:
    """Group size, sequences and sampler, of a role that generates."""
    if not any(rpc.model == role and rpc.method == "generate" for rpc in experiment.graph.rpcs):
        return {}
    found = [value for _, value in _items(experiment.interfaces[role]) if isinstance(value, GenerationConfig)]
    if not found:
        return {}
    return {
        "group size (responses per prompt)": str(found[0].n),
        "sequences per step": f"{found[0].n * experiment.batch_prompts:,}",
        "sampler": found[0].describe(),
    }


def _describe(interface: ModelInterface, batch_prompts: int) -> dict[str, str]:
    describe = getattr(interface, "describe", None)
    return describe(batch_prompts) if describe is not None else {}


def _items(value: Any) -> list[tuple[str, Any]]:
    """Names and values of the fields of a dataclass; none of anything else."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return []
    return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]

"""Run summary printed at launch: the config in prompts, sequences, tokens and steps."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from itertools import takewhile
from typing import Any

from realign.api import ModelInterface, Plan, part_sizes
from realign.api.sampler import ConfiguresSampler
from realign.engines.shared_model import shared_roles
from realign.errors import RealignError
from realign.runtime import Experiment
from realign.runtime.checks.auto_memory import Decision, decide
from realign.runtime.checks.parts import unread_inputs
from realign.runtime.processes.placement import plan_groups
from realign.text import visible

LOSS = "loss"
"""Row of `describe` that is skipped for a role that the graph does not train, such as PPO's reward model."""


def derived_rows(experiment: Experiment) -> list[tuple[str, str]]:
    """Return the name and value of each row.

    Reads numbers from the interfaces' `plan()`, and descriptions of algorithms from their `describe()`.
    """
    e = experiment
    rows = {"steps": f"{e.steps:,}", "prompts per step": f"{e.batch_prompts:,}"}
    rows |= {"data": source} if (source := e.data.describe_source()) else {}
    roles = list(dict.fromkeys(rpc.model for rpc in e.graph.rpcs))
    trained = {rpc.model for rpc in e.graph.rpcs if rpc.method == "train_step"}
    for role in roles:
        rows |= _sampling_rows(e, role)
    described = {role: _role_rows(e, role, trained=role in trained) for role in roles}
    several = sum(map(bool, described.values())) > 1
    for role, own in described.items():
        rows |= {f"{role}: {name}" if several else name: value for name, value in own.items()}
    if classes := [text for role in roles for text in _own_classes(e.interfaces[role], f"interfaces.{role}")]:
        rows["classes of your own"] = "; ".join(classes)
    if e.rollout.ahead:
        rows["responses are sampled"] = e.rollout.describe()
    if e.curriculum is not None:
        rows["curriculum"] = e.curriculum.describe()
    if e.dynamic_sampling is not None:
        rows["dynamic sampling"] = (
            f"groups with {e.dynamic_sampling.describe()}, out of up to {e.dynamic_sampling.max_batches} batches of "
            f"{e.prompts_at_once:,} prompts"
        )
    limit = e.microbatch.max_tokens_per_microbatch
    rows["tokens per micro-batch"] = "no limit" if limit is None else f"at most {limit:,}"
    if temperatures := e.temperatures:
        rows["temperature"] = f"{next(iter(temperatures.values())):g} ({', '.join(temperatures)})"
    for where, evaluation in e.all_evaluations.items():
        name = where.replace("evaluations.", "evaluation ")
        rows[name] = f"every {evaluation.every_steps} steps, before and after; {evaluation.describe()}"
    rows["checkpoints"] = "none" if e.checkpoint is None else e.checkpoint.describe()
    if e.calibration is not None:
        rows["reward calibration"] = e.calibration.describe()
    rows |= _compute_rows(e)
    rows |= _memory_rows(e)
    if e.runtime.starts_workers:
        rows["worker processes"] = "; ".join(group.describe() for group in plan_groups(e))
    rows |= _external_rows(e)
    if shared := shared_roles(e.models):
        rows["roles that share a model"] = "; ".join(f"{role}: {what}" for role, what in shared.items())
    if e.graph.sync:
        rows["weights after a step"] = "; ".join(f"{role}: {sync.describe()}" for role, sync in e.graph.sync.items())
    if e.filled_roles:
        rows["roles filled in by default"] = "; ".join(f"{role}: {what}" for role, what in e.filled_roles.items())
    if not str(e.resolved.get("graph", {}).get("_target_", "")).startswith("realign."):  # for authors of a graph
        if keys := e.graph.unread():
            rows["results that nothing reads"] = ", ".join(keys)
        if unread := unread_inputs(e.graph, e.interfaces):
            rows["inputs that no component reads"] = "; ".join(f"{k}: {', '.join(v)}" for k, v in unread.items())
    idle = [f"interfaces.{r}" for r in e.interfaces if r not in roles]
    idle += [f"models.{r}" for r in e.models if r not in e.roles]
    idle += [f"models.{r}.optimizer" for r, spec in e.models.items() if r not in trained and spec.facts().trainable]
    if idle:
        rows["config keys never read"] = ", ".join(idle)
    if e.idle:
        rows["settings without effect"] = "; ".join(e.idle)
    if e.dropped:
        rows["config keys replaced by a higher layer"] = _by_layer(e.dropped)
    return [(visible(name), visible(value)) for name, value in rows.items()]


def _by_layer(dropped: Sequence[str]) -> str:
    """Return the replaced keys, with the files of several keys once."""
    groups: dict[str, list[str]] = {}
    for text in dropped:
        setting, _, layers = text.rpartition(" of ")
        groups.setdefault(layers, []).append(setting)
    return "; ".join(f"{', '.join(settings)} of {layers}" for layers, settings in groups.items())


def _own_classes(value: Any, key: str) -> Iterator[str]:
    """Yield key and class of an interface and of each of its components, where the class is not in the package.

    A component also has the fields that its class adds or declares again. The rows of `describe` state all others.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _own_classes(item, f"{key}.{name}")
    if isinstance(value, type) or not is_dataclass(value):
        return
    parts = {field.name: getattr(value, field.name, None) for field in fields(value)}
    own = list(takewhile(lambda cls: not cls.__module__.startswith("realign."), inspect.getmro(type(value))))
    if own:
        declared = {name for cls in own for name in inspect.get_annotations(cls)}
        texts = [f"{name} {part}" for name, part in parts.items() if name in declared and not is_dataclass(part)]
        settings = f" ({', '.join(texts)})" if texts and not isinstance(value, ModelInterface) else ""
        yield f"{key}: {own[0].__module__}.{own[0].__qualname__}{settings}"
    for name, part in parts.items():
        yield from _own_classes(part, f"{key}.{name}")


def _compute_rows(experiment: Experiment) -> dict[str, str]:
    """Return a row with device, precision and attention kernel of each model; empty if no model states them."""
    specs = {role: experiment.models[role] for role in experiment.roles if role in experiment.models}
    types = {role: str(compute) for role, spec in specs.items() if (compute := spec.facts().compute) is not None}
    if not types:
        return {}
    if len(set(types.values())) == 1:
        return {"models compute on": next(iter(types.values()))}
    return {"models compute on": "; ".join(f"{role}: {compute}" for role, compute in types.items())}


def _memory_rows(experiment: Experiment) -> dict[str, str]:
    """Return a row for each `auto` setting that the memory of a device decides; empty on a CPU."""
    rows: dict[str, list[Decision]] = {}
    for choice in decide(experiment):
        rows.setdefault(choice.setting, []).append(choice)
    return {
        setting: "; ".join(f"{choice.role}: {choice}" if len(choices) > 1 else str(choice) for choice in choices)
        for setting, choices in rows.items()
    }


def _external_rows(experiment: Experiment) -> dict[str, str]:
    """Return a row that lists samplers without bitwise reproducibility; empty if there is none."""
    samplers: dict[str, str] = {}
    for role in experiment.roles:
        spec = experiment.models.get(role)
        if isinstance(spec, ConfiguresSampler) and not spec.sampler.capabilities().bitwise:
            samplers[role] = type(spec.sampler).__name__
    if not samplers:
        return {}
    names = ", ".join(f"{name} ({role})" for role, name in samplers.items())
    return {
        "samplers that are not bitwise": f"{names}: micro-batches, ranks, restarts and staleness can change the results"
    }


def _sampling_rows(experiment: Experiment, role: str) -> dict[str, str]:
    """Return group size, sequences per step and sampler of a role that generates; empty for other roles."""
    if not any(rpc.model == role and rpc.method == "generate" for rpc in experiment.graph.rpcs):
        return {}
    plan = experiment.interfaces[role].plan()
    n = plan.responses_per_prompt
    rows: dict[str, str] = {}
    if n is not None:
        rows |= {
            "group size (responses per prompt)": str(n),
            "sequences per step": f"{n * experiment.batch_prompts:,}",
        }
    # otherwise the row of the temperature says it all
    distorted = plan.generation.distortions() if plan.generation is not None else not plan.exact_sampling
    return rows | ({"sampler": plan.sampler} if plan.sampler is not None and distorted else {})


def _role_rows(experiment: Experiment, role: str, *, trained: bool) -> dict[str, str]:
    """Return the rows of a role: its optimizer steps, and the description of its algorithm."""
    interface = experiment.interfaces[role]
    described = {name: value for name, value in interface.describe(experiment.batch_prompts).items() if value}
    if not trained:
        return {name: value for name, value in described.items() if name != LOSS}
    return _training_rows(experiment, interface.plan()) | _rate_row(experiment, role) | described


def _rate_row(experiment: Experiment, role: str) -> dict[str, str]:
    """Return the learning rate of a role if the size of its model decides it."""
    with suppress(RealignError):  # a config that cannot be read is an error of loading, which names the role
        if (spec := experiment.models.get(role)) is not None and (by_size := spec.rate_by_size(role)) is not None:
            return {"learning rate": f"{by_size[0]:g} (by size: {by_size[1]:,} weights)"}
    return {}


def _training_rows(experiment: Experiment, plan: Plan) -> dict[str, str]:
    """Return the rows about the optimizer steps of a role."""
    most = " at most" if plan.at_most else ""
    idle = plan.first_training_step - 1
    total = plan.optimizer_steps * max(0, experiment.steps - idle)
    epochs, minibatches = plan.epochs, plan.n_minibatches
    parts = f" ({epochs} epoch{'s' * (epochs != 1)} x {minibatches} mini-batch{'es' * (minibatches != 1)})"
    rows = {
        "optimizer steps per step": f"{plan.optimizer_steps}{most}{parts if plan.optimizer_steps != 1 else ''}",
        "prompts per optimizer step": part_sizes(experiment.batch_prompts, plan.n_minibatches) + most,
    }
    rows |= {"steps before the first update": f"{idle:,}"} if idle else {}
    return rows | {"total optimizer steps": f"{total:,}{most}"}

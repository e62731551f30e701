"""`build_experiment`: the values of a config become an `Experiment`, typed and checked, with nothing loaded."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from realign.config.construct import INTERFACES, build, build_graph
from realign.config.errors import ConfigError, suggest, unknown_key
from realign.config.layers import OWNS
from realign.config.places import ROOTS
from realign.config.schema import COMPONENTS, REPORT, ExperimentConfig
from realign.config.targets import import_target
from realign.config.words import TARGET

if TYPE_CHECKING:
    from realign.runtime import Experiment


def build_experiment(config: ExperimentConfig) -> Experiment:
    """Import the classes that the config names, construct and check them; load no model and no data.

    Raises:
        ConfigError: a component is wrong; names the key.
        ValueError: the parts do not fit: the graph's roles, temperatures, an evaluation without a model.
    """
    with _owners_named(config.owners):
        return _build(config)


def _build(config: ExperimentConfig) -> Experiment:
    # Imported here: composing a config must not wait for torch.
    from realign.api import DataflowGraph, MicroBatchSpec, ModelInterface, ModelSpec, Sync
    from realign.data import DataSpec
    from realign.runtime import DynamicSampling, Experiment, RewardCalibration, RolloutSpec, RuntimeSpec
    from realign.runtime.checkpoint.exports import CheckpointSpec
    from realign.runtime.evaluation.base import Evaluator
    from realign.runtime.metrics.trackers import TrackerSpec

    _check_names(config)
    interfaces = _roles(config, ModelInterface, "interfaces")
    graph = build_graph(config.graph, DataflowGraph, "graph", interfaces)
    models = _roles(config, ModelSpec, "models")
    data: DataSpec = build(config.data, DataSpec, "data")
    dynamic_sampling: DynamicSampling | None = None
    if config.dynamic_sampling:
        dynamic_sampling = _one(config, DynamicSampling, "dynamic_sampling")
    evaluation: Evaluator | None = None
    if config.evaluation:
        evaluation = _one(config, Evaluator, "evaluation")
        if evaluation.role not in models:
            raise ConfigError(f"evaluation.role: no model plays {evaluation.role!r}{suggest(evaluation.role, models)}")
    calibration: RewardCalibration | None = None
    if config.calibration:
        calibration = _one(config, RewardCalibration, "calibration")
    if not config.output_dir.strip():
        raise ConfigError("output_dir is empty, and the run would write into the current folder; name a folder")
    try:
        microbatch = MicroBatchSpec(**dataclasses.asdict(config.microbatch))
    except ValueError as error:
        raise ConfigError(f"microbatch.{error}") from error
    experiment = Experiment(
        name=config.name,
        seed=config.seed,
        output_dir=Path(config.output_dir),
        overwrite=config.overwrite,
        steps=config.steps,
        batch_prompts=config.batch_prompts,
        microbatch=microbatch,
        graph=graph,
        sync=_roles(config, Sync, "sync"),
        interfaces=interfaces,
        models=models,
        data=data,
        shuffle=config.shuffle,
        dynamic_sampling=dynamic_sampling,
        evaluation=evaluation,
        calibration=calibration,
        save_every_steps=config.save_every_steps,
        keep_saves=config.keep_saves,
        save_best=config.save_best,
        sample_prompts=config.sample_prompts,
        print_samples_every_steps=config.print_samples_every_steps,
        trackers=_roles(config, TrackerSpec, "trackers"),
        runtime=_one(config, RuntimeSpec, "runtime"),
        rollout=_one(config, RolloutSpec, "rollout"),
        ratio_tolerance=config.ratio_tolerance,
        strict_ratio=config.strict_ratio,
        checkpoint=None if config.checkpoint is None else CheckpointSpec(**dataclasses.asdict(config.checkpoint)),
        resume=config.resume,
        resume_allow=config.resume_allow,
        resume_skip=config.resume_skip,
    )
    experiment.dropped = list(config.dropped)
    _check_owned(config.owners, vars(experiment))
    experiment.resolved = resolved_config(config, experiment)
    return experiment


def _check_names(config: ExperimentConfig) -> None:
    """Find names of roles that are misspelt: the override of one makes a new role, which lacks everything else."""
    complete = [role for role, node in config.interfaces.items() if isinstance(node, Mapping) and TARGET in node]
    for role, node in config.interfaces.items():
        if isinstance(node, Mapping) and TARGET not in node and node:
            raise ConfigError(
                f"interfaces.{role}.{TARGET} is missing: no role is called {role!r}{suggest(role, complete)}"
            )
    played = set(config.interfaces)
    for part, key, default in ((config.evaluation, "role", "actor"), (config.calibration, "policy", "policy")):
        played |= {str(part.get(key, default))} if part else set()
    for role in config.models:
        # one that is like none of them may be left over, and is listed as never read
        if role not in played and difflib.get_close_matches(role, played, cutoff=0.75):
            raise ConfigError(f"models.{role}: no interface plays {role!r}{suggest(role, played)}")


def resolved_config(config: ExperimentConfig, experiment: Experiment) -> dict[str, Any]:
    """The whole truth about a run as plain values: what the config said, and every default of every component."""
    whole = {key: value for key, value in dataclasses.asdict(config).items() if key not in (*COMPONENTS, *REPORT)}
    parameters = inspect.signature(import_target(config.graph[TARGET], f"graph.{TARGET}")).parameters.values()
    defaults = [p for p in parameters if p.name != INTERFACES]
    return whole | {
        "models": {role: as_node(spec) for role, spec in experiment.models.items()},
        "interfaces": {role: as_node(interface) for role, interface in experiment.interfaces.items()},
        "graph": {TARGET: config.graph[TARGET], **{p.name: as_node(p.default) for p in defaults}, **config.graph},
        "sync": {role: as_node(sync) for role, sync in experiment.sync.items()},
        "data": as_node(experiment.data),
        "dynamic_sampling": as_node(experiment.dynamic_sampling),
        "evaluation": as_node(experiment.evaluation),
        "calibration": as_node(experiment.calibration),
        "runtime": as_node(experiment.runtime),
        "rollout": as_node(experiment.rollout),
        "trackers": {name: as_node(spec) for name, spec in experiment.trackers.items()},
    }


def as_node(value: Any, declared: Any = None) -> Any:
    """The config node that `build` makes `value` from, without `_target_` where the annotation `declared` says it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        cls = type(value)
        hints = get_type_hints(cls)
        said = declared is cls or cls in get_args(declared)
        node = {} if said else {TARGET: f"{cls.__module__}.{cls.__qualname__}"}
        return node | {
            f.name: as_node(getattr(value, f.name), hints[f.name]) for f in dataclasses.fields(value) if f.init
        }
    if isinstance(value, Enum):
        return value.name.rstrip("_")  # as `choices_of` reads it
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key: as_node(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_node(item) for item in value]
    return value


def _roles(config: ExperimentConfig, kind: Any, root: str) -> dict[str, Any]:
    """The component of each role; a role set to null is left out."""
    target = _default_target(root)
    return {
        role: build({**target, **node} if isinstance(node, Mapping) else node, kind, f"{root}.{role}")
        for role, node in getattr(config, root).items()
        if node is not None
    }


def _one(config: ExperimentConfig, kind: Any, root: str) -> Any:
    return build({**_default_target(root), **getattr(config, root)}, kind, root)


def _default_target(root: str) -> dict[str, str]:
    default = ROOTS[root].default
    return {} if default is None else {TARGET: default}


def _check_owned(owners: Mapping[str, str], built: Mapping[str, Any]) -> None:
    """Find places that a preset claims to own, and that no class has."""
    for place, owner in owners.items():
        root, *names = place.split(".")
        value, key = built.get(root), root
        for name in names:
            if isinstance(value, Mapping):
                value = value.get(name)  # a role that this experiment may lack
            elif dataclasses.is_dataclass(value):
                fields = [field.name for field in dataclasses.fields(value)]
                if name not in fields:
                    raise ConfigError(f"{owner}: {OWNS} lists {place}, but {unknown_key(f'{key}.{name}', fields)}")
                value = getattr(value, name)
            key = f"{key}.{name}"


@contextmanager
def _owners_named(owners: Mapping[str, str]) -> Iterator[None]:
    """Name the preset in an error about a key that its class lacks."""
    try:
        yield
    except ConfigError as error:
        for place, owner in owners.items():
            if f"unknown key '{place}." in str(error):
                raise ConfigError(f"{error}; {owner} sets the class of {place}") from error
        raise

"""`build_experiment`: turn the values of a config into a validated `Experiment`, without loading models or data."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from realign.config.construct import INTERFACES, build, build_graph, convert, unknown_keys
from realign.config.default_correction import with_default_correction
from realign.config.errors import ConfigError, joined, not_a_component, suggest, unknown_key
from realign.config.evaluation import Training, build_evaluation
from realign.config.layers import OWNS
from realign.config.places import ROOTS
from realign.config.schema import COMPONENTS, REPORT, ExperimentConfig
from realign.config.targets import import_target
from realign.config.words import TARGET
from realign.errors import SettingsError
from realign.settings import own_settings

if TYPE_CHECKING:
    from realign.api.callback import Callback
    from realign.runtime import Experiment


def build_experiment(config: ExperimentConfig) -> Experiment:
    """Import, construct and check the classes that the config names. Loads no model and no data.

    Raises:
        ConfigError: a component is invalid, or components do not match, such as roles of the graph, temperatures, or an
            evaluation without a model. The message names the key.
    """
    with _owners_named(config.owners):
        return _build(config)


def _build(config: ExperimentConfig) -> Experiment:
    # Imported here, so that composing a config does not import torch.
    from realign.api import DataflowGraph, MicroBatchSpec, ModelInterface, ModelSpec, Sync
    from realign.data import DataSpec
    from realign.runtime import DynamicSampling, Experiment, RewardCalibration, RolloutSpec, RuntimeSpec
    from realign.runtime.checkpoint.background_writer import CheckpointSpec
    from realign.runtime.evaluation.base import Evaluator
    from realign.runtime.metrics.details import RecordSpec
    from realign.runtime.metrics.trackers import TrackerSpec

    _check_names(config)
    if unknown := unknown_keys(vars(config)):
        raise ConfigError(joined(unknown))
    models = _roles(config, ModelSpec, "models")
    config = dataclasses.replace(config, interfaces=with_default_correction(config.interfaces, models))
    interfaces = _roles(config, ModelInterface, "interfaces")
    graph = build_graph(config.graph, DataflowGraph, "graph", interfaces)
    data: DataSpec = build(config.data, DataSpec, "data")
    dynamic_sampling: DynamicSampling | None = None
    if config.dynamic_sampling:
        dynamic_sampling = _one(config, DynamicSampling, "dynamic_sampling")
    training = Training(graph, interfaces, data)
    evaluation: Evaluator | None = None
    if config.evaluation:
        evaluation = build_evaluation(config.evaluation, "evaluation", training, models)
    evaluations = {
        name: build_evaluation(_node(node, f"evaluations.{name}"), f"evaluations.{name}", training, models)
        for name, node in config.evaluations.items()
        if node is not None
    }
    calibration: RewardCalibration | None = None
    if config.calibration:
        calibration = _one(config, RewardCalibration, "calibration")
    if not config.output_dir.strip():
        raise ConfigError("output_dir is empty: the run would write into the current folder. Name a folder.")
    try:
        microbatch = MicroBatchSpec(**dataclasses.asdict(config.microbatch))
    except SettingsError as error:
        raise ConfigError(f"microbatch.{error}") from error
    try:
        records = RecordSpec(**dataclasses.asdict(config.records))
    except SettingsError as error:
        raise ConfigError(f"records.{error}") from error
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
        evaluations=evaluations,
        calibration=calibration,
        save_every_steps=config.save_every_steps,
        keep_saves=config.keep_saves,
        save_best=config.save_best,
        sample_prompts=config.sample_prompts,
        records=records,
        print_samples_every_steps=config.print_samples_every_steps,
        trackers=_roles(config, TrackerSpec, "trackers"),
        callbacks=_callbacks(config),
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
    """Raise an error for misspelled role names: overriding one creates a new, incomplete role."""
    complete = [role for role, node in config.interfaces.items() if isinstance(node, Mapping) and TARGET in node]
    for role, node in config.interfaces.items():
        if isinstance(node, Mapping) and TARGET not in node and node:
            raise ConfigError(
                f"interfaces.{role}.{TARGET} is missing: no role is called {role!r}{suggest(role, complete)}"
            )
    played = set(config.interfaces)
    evaluated = [config.evaluation, *(node for node in config.evaluations.values() if isinstance(node, Mapping))]
    for part, key, default in (*((e, "role", "actor") for e in evaluated), (config.calibration, "policy", "policy")):
        played |= {str(part.get(key, default))} if part else set()
    for role in config.models:
        # An unused model with another name is allowed; the run summary lists it as never read.
        if role not in played and difflib.get_close_matches(role, played, cutoff=0.75):
            raise ConfigError(f"models.{role}: no interface plays {role!r}{suggest(role, played)}")


def resolved_config(config: ExperimentConfig, experiment: Experiment) -> dict[str, Any]:
    """Return the complete config of a run as plain values, including every default of every component."""
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
        "evaluations": {name: as_node(evaluation) for name, evaluation in experiment.evaluations.items()},
        "calibration": as_node(experiment.calibration),
        "runtime": as_node(experiment.runtime),
        "rollout": as_node(experiment.rollout),
        "trackers": {name: as_node(spec) for name, spec in experiment.trackers.items()},
        "callbacks": {name: as_node(callback) for name, callback in experiment.callbacks.items()},
    }


def as_node(value: Any, declared: Any = None) -> Any:
    """Return the config node from which `build` constructs `value`.

    Omits `_target_` if the annotation `declared` implies the class.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        cls = type(value)
        hints = get_type_hints(cls)
        said = declared is cls or cls in get_args(declared)
        node = {} if said else {TARGET: f"{cls.__module__}.{cls.__qualname__}"}
        return node | {f.name: as_node(getattr(value, f.name), hints[f.name]) for f in own_settings(cls)}
    if isinstance(value, Enum):
        return value.name.rstrip("_")  # the format of `choices_of`
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key: as_node(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_node(item) for item in value]
    return value


def _roles(config: ExperimentConfig, kind: Any, root: str) -> dict[str, Any]:
    """Build the component of each role. Skips roles that are null."""
    target = _default_target(root)
    return {
        role: build({**target, **node} if isinstance(node, Mapping) else node, kind, f"{root}.{role}")
        for role, node in getattr(config, root).items()
        if node is not None
    }


def _callbacks(config: ExperimentConfig) -> dict[str, Callback]:
    """Build the callbacks, which a bare word can select. Skips those that are null or none."""
    from realign.api.callback import Callback

    found = {}
    for name, node in config.callbacks.items():
        where = f"callbacks.{name}"
        component = isinstance(node, Mapping)
        found[name] = build(node, Callback, where) if component else convert(node, Callback | None, where)
    return {name: callback for name, callback in found.items() if callback is not None}


def _node(node: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(node, Mapping):
        raise ConfigError(not_a_component(where, repr(node)))
    return node


def _one(config: ExperimentConfig, kind: Any, root: str) -> Any:
    return build({**_default_target(root), **getattr(config, root)}, kind, root)


def _default_target(root: str) -> dict[str, str]:
    default = ROOTS[root].default
    return {} if default is None else {TARGET: default}


def _check_owned(owners: Mapping[str, str], built: Mapping[str, Any]) -> None:
    """Raise an error if a preset lists a field under `owns` that its class does not have."""
    for place, owner in owners.items():
        root, *names = place.split(".")
        value, key = built.get(root), root
        for name in names:
            if isinstance(value, Mapping):
                value = value.get(name)  # a role that this experiment does not need to have
            elif dataclasses.is_dataclass(value):
                fields = [field.name for field in dataclasses.fields(value)]
                if name not in fields:
                    raise ConfigError(f"{owner}: {OWNS} lists {place}, but {unknown_key(f'{key}.{name}', fields)}")
                value = getattr(value, name)
            key = f"{key}.{name}"


@contextmanager
def _owners_named(owners: Mapping[str, str]) -> Iterator[None]:
    """Add the name of the preset to an error about a key that the class from the preset does not have."""
    try:
        yield
    except ConfigError as error:
        for place, owner in owners.items():
            if f"unknown key '{place}." in str(error):
                raise ConfigError(f"{error}; {owner} sets the class of {place}") from error
        raise

"""An experiment: the schema of its YAML file, and `build_experiment`, which turns its values into an `Experiment`.

A component is a mapping with `_target_`, the import path of a dataclass, and values of its fields. Defaults of a
component are defined only in its dataclass, and those of the run in `realign.run_settings`.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

from realign.config.classes import import_path
from realign.config.construct import (
    INTERFACES,
    build,
    build_graph,
    convert,
    fill,
    import_target,
    with_import_path,
)
from realign.config.errors import ConfigError, join_messages, not_a_component, suggest, unknown_key
from realign.config.places import ROOTS, Place, place_of
from realign.config.trees import has, remove
from realign.config.words import TARGET, of_sibling
from realign.errors import NoEffectError, SettingsError
from realign.run_settings import RunSettings
from realign.settings import Count, default_of, hints_of

if TYPE_CHECKING:
    from realign.api import RPC, DataflowGraph, GenerationConfig, ModelInterface, ModelSpec
    from realign.data import DataSpec
    from realign.runtime import Experiment
    from realign.runtime.evaluation.base import Evaluator

MISSING: Any = "???"
"""Value of a key that must be set."""
COMPONENTS = tuple(ROOTS)
"""Root keys that contain components. Any key may be set in them; building checks the keys against the classes."""
REPORT = ("dropped", "presets", "typed")
"""Root keys that only `compose` sets."""
SHORTHANDS: Mapping[str, str] = MappingProxyType({"function": "functions"})
"""Field of a component -> the field that it is a shorthand of. A missing value (`???`) of the former is allowed if the
latter is set."""


@dataclass(kw_only=True)
class ExperimentConfig(RunSettings):
    """Root of the config. One step is one pass over the graph with `batch_prompts` prompts."""

    output_dir: str = "runs/${name}"
    steps: Count = MISSING
    batch_prompts: Count = MISSING
    threads: int | None = None
    """Number of CPU threads of torch; null keeps torch's default."""
    dropped: list[str] = field(default_factory=list)
    """Set by `compose`: discarded keys of lower layers, with their file."""
    presets: dict[str, str] = field(default_factory=dict)
    """Set by `compose`: config key -> the preset that sets it, such as algorithm=gspo."""
    typed: list[str] = field(default_factory=list)
    """Set by `compose`: keys of the command line."""

    def __post_init__(self) -> None:
        """Check nothing. `Experiment` checks the values, which may be missing here."""


def has_experiment(config: Mapping[str, Any]) -> bool:
    """Return whether a config chooses the class of an interface. A preset alone only sets fields."""
    return any(isinstance(node, Mapping) and TARGET in node for node in (config.get("interfaces") or {}).values())


def unknown_keys(config: Mapping[str, Any], roots: Iterable[str] = ROOTS) -> list[str]:
    """Return a message for each key of the components and nested settings that their classes do not have.

    Skips components whose class is unknown, such as one that cannot be imported; building them reports their keys. The
    class of an evaluation depends on the graph, and the graph on the interfaces.

    Args:
        config: Values by root key.
        roots: Root keys to check.
    """
    messages: list[str] = []
    for root in roots:
        node = config.get(root)
        if not isinstance(node, Mapping) or root.startswith("evaluation") or (root == "graph" and TARGET not in node):
            continue
        if root in ROOTS and ROOTS[root].per_role:
            for role, below in node.items():
                messages += _unknown_below(place_of((root, str(role))), below)
        else:
            messages += _unknown_below(place_of((root,)), node)
    return messages


def _unknown_below(place: Place, node: Any) -> Iterator[str]:
    if not isinstance(node, Mapping):
        return
    target = node.get(TARGET)
    known = place.fields(target)
    if known is None:
        return
    for name, value in node.items():
        if name in known:
            yield from _unknown_below(place.child(name, target), value)
        elif name != TARGET:
            key, cls = f"{place.key}.{name}", place.class_of(target)
            yield (cls and of_sibling(cls, key)) or place.of_related(name, target) or unknown_key(key, known)


def build_experiment(config: ExperimentConfig) -> Experiment:
    """Import and construct the classes that the config names. Loads no model and no data.

    `run` compares the components with each other (`realign.runtime.checks.parts`).

    Raises:
        ConfigError: a component is invalid. The message names the key.
    """
    idle: list[str] = []
    with _presets_named(config.presets):
        while True:  # a constructor names one setting without effect at a time; files rarely have any
            try:
                experiment = _build(config)
            except NoEffectError as error:
                if any(_overlap(key, error.key) for key in config.typed):
                    # as other errors: of the run itself, or of a component with its full key
                    raise (ConfigError if "." in error.key else SettingsError)(str(error)) from error
                config = _without(config, error)
                idle.append(f"{error.key}{error.value and '='}{error.value} ({error.reason.partition('. ')[0]})")
            else:
                experiment.idle = idle
                return experiment


def _overlap(key: str, other: str) -> bool:
    """Return whether two keys are equal, or one is below the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def _without(config: ExperimentConfig, error: NoEffectError) -> ExperimentConfig:
    """Return the config without a key of a file that has no effect, so that its class gives the default."""
    root, *names = error.key.split(".")
    if not names:
        return dataclasses.replace(config, **{root: default_of(ExperimentConfig, root)})
    tree = copy.deepcopy({root: getattr(config, root)})
    if not has(tree, (root, *names)):
        raise error
    remove(tree, (root, *names))
    return dataclasses.replace(config, **tree)


def _build(config: ExperimentConfig) -> Experiment:
    # Imported here, so that composing a config does not import torch.
    from realign.api import DataflowGraph, MicroBatchSpec
    from realign.data import DataSpec
    from realign.runtime import Experiment

    _check_names(config)
    if unknown := unknown_keys(vars(config)):
        raise ConfigError(join_messages(unknown))
    # In the order of dependence: the default correction follows from the samplers of the models, the graph from the
    # interfaces, and evaluations from graph, interfaces and data.
    models = _roles(config, "models")
    config = dataclasses.replace(config, interfaces=_with_default_correction(config.interfaces, models))
    interfaces = _roles(config, "interfaces")
    graph = build_graph(_graph_node(config, interfaces), DataflowGraph, "graph", interfaces)
    data: DataSpec = build(config.data, DataSpec, "data")
    dynamic_sampling = _one(config, "dynamic_sampling") if config.dynamic_sampling else None
    training = Training(graph, interfaces, data)
    evaluation: Evaluator | None = None
    if config.evaluation:
        evaluation = _build_evaluation(config.evaluation, "evaluation", training, models)
    evaluations = {
        name: _build_evaluation(_node(node, f"evaluations.{name}"), f"evaluations.{name}", training, models)
        for name, node in config.evaluations.items()
        if node is not None
    }
    if not config.output_dir.strip():
        raise ConfigError("output_dir is empty: the run would write into the current folder. Name a folder.")
    plain = {f.name: getattr(config, f.name) for f in dataclasses.fields(RunSettings) if f.name not in COMPONENTS}
    converted = {
        "output_dir": Path(config.output_dir),
        "microbatch": MicroBatchSpec(**dataclasses.asdict(config.microbatch)),
    }
    experiment = Experiment(
        **(plain | converted),
        graph=graph,
        interfaces=interfaces,
        models=models,
        sync=_roles(config, "sync"),
        data=data,
        curriculum=_one(config, "curriculum") if config.curriculum else None,
        dynamic_sampling=dynamic_sampling,
        evaluation=evaluation,
        evaluations=evaluations,
        calibration=_one(config, "calibration") if config.calibration else None,
        trackers=_roles(config, "trackers"),
        callbacks=_roles(config, "callbacks"),
        runtime=_one(config, "runtime"),
        rollout=_one(config, "rollout"),
        dropped=list(config.dropped),
    )
    experiment.resolved = resolve_config(config, experiment)
    return experiment


def _graph_node(config: ExperimentConfig, interfaces: Mapping[str, ModelInterface]) -> dict[str, Any]:
    """Return the node of the graph.

    Unless `_target_` is set, it is the function `dataflow` in the module of the actor's class, or of its base class.
    Without an actor, as for a reward model, it is that of the first role.
    """
    owner = interfaces.get("actor", next(iter(interfaces.values()), None))
    for cls in type(owner).__mro__:
        if inspect.isfunction(getattr(sys.modules.get(cls.__module__), "dataflow", None)):
            return {TARGET: f"{cls.__module__}.dataflow", **config.graph}
    return config.graph


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


def resolve_config(config: ExperimentConfig, experiment: Experiment) -> dict[str, Any]:
    """Return the complete config of a run as plain values, including every default of every component."""
    plain = {key: value for key, value in dataclasses.asdict(config).items() if key not in (*COMPONENTS, *REPORT)}
    graph = _graph_node(config, experiment.interfaces)
    parameters = inspect.signature(import_target(graph[TARGET], f"graph.{TARGET}")).parameters.values()
    defaults = [p for p in parameters if p.name != INTERFACES]
    graph = {**{p.name: as_node(p.default) for p in defaults}, **graph}
    return plain | {key: graph if key == "graph" else as_node(getattr(experiment, key)) for key in COMPONENTS}


def as_node(value: Any, declared: Any = None) -> Any:
    """Return the config node from which `build` constructs `value`.

    Omits `_target_` if the annotation `declared` implies the class.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        cls = type(value)
        hints = hints_of(cls)
        annotated = declared is cls or cls in get_args(declared)
        node = {} if annotated else {TARGET: f"{cls.__module__}.{cls.__qualname__}"}
        fields = [f for f in dataclasses.fields(cls) if f.init]
        return node | {f.name: as_node(getattr(value, f.name), hints[f.name]) for f in fields}
    if isinstance(value, Enum):
        return value.name.rstrip("_")  # the format of `choices_of`
    if isinstance(value, Path | str):
        return str(value)  # exactly a text, also of `SessionFunction`
    if isinstance(value, Mapping):
        return {key: as_node(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_node(item) for item in value]
    return value


def _roles(config: ExperimentConfig, root: str) -> dict[str, Any]:
    """Build the component of each role. Skips roles that are null, or the word none."""
    kind, target = _kind(root), _default_target(root)
    built = {}
    for role, node in getattr(config, root).items():
        where = f"{root}.{role}"
        # Other root words are import paths by now (`spell_out`); these have no module per word.
        if root in ("callbacks", "trackers") and not isinstance(node, Mapping):  # a bare word
            built[role] = convert(node, kind | None, where)
        elif node is not None:
            built[role] = build({**target, **node} if isinstance(node, Mapping) else node, kind, where)
    return {role: component for role, component in built.items() if component is not None}


def _node(node: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(node, Mapping):
        raise ConfigError(not_a_component(where, repr(node)))
    return node


def _one(config: ExperimentConfig, root: str) -> Any:
    return build({**_default_target(root), **getattr(config, root)}, _kind(root), root)


def _kind(root: str) -> Any:
    return import_target(ROOTS[root].kind, root)


def _default_target(root: str) -> dict[str, str]:
    default = ROOTS[root].default
    return {} if default is None else {TARGET: default}


@contextmanager
def _presets_named(presets: Mapping[str, str]) -> Iterator[None]:
    """Add the name of the preset to an error about a key that the class from the preset does not have."""
    try:
        yield
    except ConfigError as error:
        for place, preset in presets.items():
            if f"unknown key '{place}." in str(error):
                raise ConfigError(f"{error}; {preset} sets the class of {place}") from error
        raise


# --- what follows from the training settings ---

_ROWS = ("path", "limit", "split", "subset", "revision", "streaming")
"""Fields of a data node that select rows. An evaluation does not take them over, since they select training rows."""
_RANDOM = ("temperature", "top_k", "top_p", "min_p")
"""Sampling settings that greedy sampling ignores."""


@dataclass(frozen=True)
class Training:
    """The training settings from which evaluations take their defaults."""

    graph: DataflowGraph
    interfaces: Mapping[str, ModelInterface]
    data: DataSpec

    @property
    def rewarding(self) -> RPC | None:
        """The RPC that writes the rewards; None if there is none."""
        name = self.graph.producers.get("rewards")
        return next((rpc for rpc in self.graph.rpcs if rpc.name == name), None)

    @property
    def role(self) -> str:
        """The role to evaluate: the actor, or else the first trained role."""
        trained = [rpc.model for rpc in self.graph.rpcs if rpc.method == "train_step"]
        return trained[0] if trained and "actor" not in trained else "actor"

    @property
    def generation(self) -> GenerationConfig | None:
        """The sampling settings of training; None if no role samples."""
        plans = (self.interfaces[rpc.model].plan() for rpc in self.graph.rpcs if rpc.model in self.interfaces)
        return next((plan.generation for plan in plans if plan.generation is not None), None)


def _build_evaluation(node: Mapping[str, Any], where: str, training: Training, models: Mapping[str, Any]) -> Evaluator:
    """Build the evaluation of a config node.

    Args:
        node: the config node.
        where: its key, `evaluation` or `evaluations.<name>`.
        training: the training settings.
        models: models by role.

    Raises:
        ConfigError: a setting is missing or invalid, or no model plays the evaluated role.
    """
    # Imported here, so that composing a config does not import torch.
    from realign.runtime.evaluation.base import Evaluator

    node = with_import_path(node, Evaluator, where)
    target = node.get(TARGET) or import_path(_default_class(node, training))
    cls = import_target(target, f"{where}.{TARGET}")
    known = _fields(cls)
    complete = {TARGET: target, "role": training.role, **node}
    if "data" in known:
        complete["data"] = _data(node.get("data", {}), f"{where}.data", training, prompts=_reads_prompts(cls))
    if "generation" in known and training.generation is not None and _is_partial(node.get("generation", {})):
        complete["generation"] = _generation(node.get("generation", {}), f"{where}.generation", training.generation)
    if "reward" in known and _is_partial(node.get("reward")):
        complete["reward"] = _reward(node["reward"], f"{where}.reward", training)
    if "episodes" in known and _is_partial(node.get("episodes", {})):
        complete["episodes"] = _episodes(node.get("episodes", {}), f"{where}.episodes", training)
    evaluator: Evaluator = build(complete, Evaluator, where)
    if evaluator.role not in models:
        raise ConfigError(f"{where}.role: no model plays {evaluator.role!r}{suggest(evaluator.role, models)}")
    return evaluator


def _default_class(node: Mapping[str, Any], training: Training) -> type[Evaluator]:
    """Return the class of a node without `_target_`.

    Responses are sampled if the training graph rewards responses, or if the node has a field that only this needs.
    """
    from realign.runtime import EpisodeEvaluation, Evaluation, LossEvaluation

    if training.rewarding is None:
        return Evaluation if node.keys() & (_fields(Evaluation) - _fields(LossEvaluation)) else LossEvaluation
    return EpisodeEvaluation if training.rewarding.method == "generate" else Evaluation


def _reads_prompts(cls: Any) -> bool:
    from realign.runtime.evaluation.base import Evaluator

    return not (isinstance(cls, type) and issubclass(cls, Evaluator)) or cls.reads_prompts


def _data(raw: Any, where: str, training: Training, *, prompts: bool) -> Any:
    """Return the data node of an evaluation: that of training, with other rows."""
    from realign.data.prompts import prompt_source

    if not _is_partial(raw):
        return raw
    base = prompt_source(training.data) if prompts else training.data
    names = _fields(type(base))
    if not raw or ("path" in names and not raw.keys() & {"path", "split"}):
        key = f"{where}.path" if "path" in names else where
        raise ConfigError(f"{key} is missing: give it the held-out rows")
    # `evaluation.data.split=test` alone means another split of the training dataset.
    keep = {"path", "subset", "revision"} if "path" not in raw else set()
    reset = {
        name: default_of(type(base), name) for name in _ROWS if name in names and name not in raw and name not in keep
    }
    return fill(type(base), raw, where, dataclasses.replace(base, **reset))  # type: ignore[type-var]


def _generation(raw: Mapping[str, Any], where: str, base: GenerationConfig) -> GenerationConfig:
    """Return the sampling settings of an evaluation: those of training, but one greedy response per prompt.

    A node that asks for several responses, or sets a sampling parameter, samples as in training.
    """
    greedy = not any(raw.get(name) is not None for name in _RANDOM) and raw.get("n", 1) == 1
    # Recorded experts and sampling masks are for the pass of training, which an evaluation lacks.
    alone = dataclasses.replace(base, n=1, greedy=greedy, router_replay=False, sampling_replay=False)
    return fill(type(base), raw, where, alone)


def _reward(raw: Mapping[str, Any], where: str, training: Training) -> Any:
    """Return the reward interface of an evaluation: that of training, with other settings."""
    rpc = training.rewarding
    base = None if rpc is None else training.interfaces.get(rpc.model)
    if base is None or base.needs_engine:
        why = "training has no reward function" if base is None else f"the reward of training is a model, {rpc.model!r}"  # type: ignore[union-attr]
        raise ConfigError(f"{where}.{TARGET} is missing: {why}. Give it the import path of a ModelInterface")
    given = dict(raw)
    for short, long in SHORTHANDS.items():  # setting one of them replaces the other one of training
        for name, other in ((short, long), (long, short)):
            if name in raw and other not in raw and {name, other} <= _fields(type(base)):
                given[other] = default_of(type(base), other)
    return fill(type(base), given, where, base)


def _episodes(raw: Mapping[str, Any], where: str, training: Training) -> Any:
    """Return the interface that samples and scores episodes: that of training, with one greedy episode per row."""
    rpc = training.rewarding
    base = None if rpc is None or rpc.method != "generate" else training.interfaces.get(rpc.model)
    if base is None:
        raise ConfigError(f"{where}.{TARGET} is missing: training has no environment. Give it the import path of one")
    given = dict(raw)
    generation = base.plan().generation
    if generation is not None and "generation" in _fields(type(base)) and _is_partial(raw.get("generation", {})):
        given["generation"] = _generation(raw.get("generation", {}), f"{where}.generation", generation)
    return fill(type(base), given, where, base)


def _is_partial(raw: Any) -> bool:
    """Return whether a value is a component without `_target_`, which takes over settings of training."""
    return isinstance(raw, Mapping) and TARGET not in raw


def _fields(cls: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()


CORRECTION, DEFAULT_CORRECTION = "correction", "importance_correction"


def _with_default_correction(interfaces: Mapping[str, Any], models: Mapping[str, ModelSpec]) -> dict[str, Any]:
    """Return the interface nodes. Those whose role has an external sampler correct for it, unless `correction` is set.

    Args:
        interfaces: Config nodes of the interfaces.
        models: Model specs by role.
    """
    from realign.api.sampler import samples_externally

    return {
        role: {**node, CORRECTION: DEFAULT_CORRECTION}
        if role in models and samples_externally(models[role]) and _corrects(node, f"interfaces.{role}")
        else node
        for role, node in interfaces.items()
    }


def _corrects(node: Any, where: str) -> bool:
    """Return whether an interface has a correction, which its node does not set."""
    if not isinstance(node, Mapping) or CORRECTION in node or TARGET not in node:
        return False
    return CORRECTION in _fields(import_target(node[TARGET], f"{where}.{TARGET}"))

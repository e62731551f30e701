"""Evaluation nodes: what a node does not set follows from the training settings.

`evaluation.data.path=held_out.jsonl` is a whole evaluation. The class follows from the graph. Data, sampling settings
and reward are those of training, except for the keys that the node sets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from realign.config.composition import SHORTHANDS
from realign.config.construct import build, fill
from realign.config.errors import ConfigError, suggest
from realign.config.targets import import_target
from realign.config.words import TARGET, import_path

if TYPE_CHECKING:
    from realign.api import RPC, DataflowGraph, GenerationConfig, ModelInterface
    from realign.data import DataSpec
    from realign.runtime.evaluation.base import Evaluator

_ROWS = ("path", "limit", "split", "subset", "revision", "streaming")
"""Fields of a data node that select rows. An evaluation does not take them over, since they select training rows."""
_RANDOM = ("temperature", "top_k", "top_p")
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


def build_evaluation(node: Mapping[str, Any], where: str, training: Training, models: Mapping[str, Any]) -> Evaluator:
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
    made: Evaluator = build(complete, Evaluator, where)
    if made.role not in models:
        raise ConfigError(f"{where}.role: no model plays {made.role!r}{suggest(made.role, models)}")
    return made


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
    keep = {"path", "subset", "revision"} if "path" not in raw else set()
    reset = {name: _default(base, name) for name in _ROWS if name in names and name not in raw and name not in keep}
    return fill(type(base), raw, where, dataclasses.replace(base, **reset))  # type: ignore[type-var]


def _generation(raw: Mapping[str, Any], where: str, base: GenerationConfig) -> GenerationConfig:
    """Return the sampling settings of an evaluation: those of training, but one greedy response per prompt.

    A node that asks for several responses, or sets a sampling parameter, samples as in training.
    """
    greedy = not any(raw.get(name) is not None for name in _RANDOM) and raw.get("n", 1) == 1
    return fill(type(base), raw, where, dataclasses.replace(base, n=1, greedy=greedy, router_replay=False))


def _reward(raw: Mapping[str, Any], where: str, training: Training) -> Any:
    """Return the reward interface of an evaluation: that of training, with other settings."""
    rpc = training.rewarding
    base = None if rpc is None else training.interfaces.get(rpc.model)
    if base is None or base.needs_engine:
        why = "training has no reward function" if base is None else f"the reward of training is a model, {rpc.model!r}"  # type: ignore[union-attr]
        raise ConfigError(f"{where}.{TARGET} is missing: {why}. Give it the import path of a ModelInterface")
    given = dict(raw)
    for short, long in SHORTHANDS.items():  # setting one of them replaces the other one of training
        for one, other in ((short, long), (long, short)):
            if one in raw and other not in raw and {one, other} <= _fields(type(base)):
                given[other] = _default(base, other)
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


def _default(owner: Any, name: str) -> Any:
    """Return the default of a field of a dataclass instance."""
    field = next(field for field in dataclasses.fields(owner) if field.name == name)
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


__all__ = ["Training", "build_evaluation"]

"""Components for the tests of words and layers: interfaces and models whose fields are component base classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from realign.api import RPC, DataflowGraph, ModelInterface
from realign.data import DataSpec
from realign.settings import Count, Fraction, Settings
from tests.config_parts import Bigram

HERE = "tests.config.components"


@dataclass
class Objective(Settings):
    """Base class without fields. It is not a choice itself."""


@dataclass
class Clip(Objective):
    low: Fraction = 0.2
    high: Fraction = 0.2
    dual: float | None = None


@dataclass
class Gspo(Objective):
    low: Fraction = 3e-4
    high: Fraction = 4e-4


@dataclass
class TightClip(Clip):
    """Inherits from another choice."""

    high: Fraction = 0.1


class Baseline(Settings, ABC):
    @abstractmethod
    def value(self) -> float: ...


@dataclass
class Zero(Baseline):
    def value(self) -> float:
        return 0.0


@dataclass
class GroupMean(Baseline):
    min_size: Count = 2

    def value(self) -> float:
        return 1.0


@dataclass
class Advantage(Settings):
    pass


@dataclass
class GAE(Advantage):
    lam: Fraction = 0.95


@dataclass
class GroupRelative(Advantage):
    baseline: Baseline = field(default_factory=GroupMean)


@dataclass
class Rejection(Settings):
    cap: float = 2.0


@dataclass
class ImportanceCorrection(Settings):
    """Base class that is its only choice."""

    cap: float = 5.0
    rejection: Rejection | None = None


class Style(Enum):
    gspo = "gspo"
    none = "none"


@dataclass
class Actor(ModelInterface):
    ALGORITHM_SETTINGS = ("objective", "correction", "style")

    objective: Objective = field(default_factory=lambda: Clip(high=0.25))
    advantage: Advantage = field(default_factory=GAE)
    correction: ImportanceCorrection | None = None
    terms: dict[str, Objective] = field(default_factory=dict)
    several: list[Objective] = field(default_factory=list)
    style: Style = Style.none
    label: str = "x"
    epochs: int = 1
    only_here: int = 0

    def train_step(self, model: Any, data: Any, mb_spec: Any) -> dict[str, Any]:
        return {}


@dataclass
class SequenceActor(ModelInterface):
    """Second interface: it shares some fields with `Actor`, and has another default objective."""

    objective: Objective = field(default_factory=Gspo)
    advantage: Advantage = field(default_factory=GAE)
    epochs: int = 1

    def train_step(self, model: Any, data: Any, mb_spec: Any) -> dict[str, Any]:
        return {}


@dataclass
class Trains(Settings):
    pass


@dataclass
class Everything(Trains):
    pass


@dataclass
class LoRA(Trains):
    rank: Count = 8


@dataclass
class AdaptedBigram(Bigram):
    trains: Trains = field(default_factory=Everything)


@dataclass
class Rows(DataSpec):
    n: int = 8
    filter: Baseline | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        return ("input_ids",)

    def load(self, tokenizer: Any) -> Any:
        raise AssertionError("no test loads data")


def dataflow() -> DataflowGraph:
    train = RPC("train", "actor", "train_step", ("input_ids",))
    return DataflowGraph((train,), dataset_keys=("input_ids",))


def flow_of_interfaces(interfaces: Mapping[str, ModelInterface], *, twice: bool = False) -> DataflowGraph:
    (role,) = interfaces
    trains = [RPC(f"train_{i}", role, "train_step", ("input_ids",)) for i in range(1 + twice)]
    return DataflowGraph(tuple(trains), dataset_keys=("input_ids",))


BASE = f"""\
# @package _global_
name: base
steps: 2
batch_prompts: 4
models:
  actor: {{_target_: {HERE}.AdaptedBigram}}
interfaces:
  actor: {{_target_: {HERE}.Actor, epochs: 3}}
graph: {{_target_: {HERE}.dataflow}}
data: {{_target_: {HERE}.Rows}}
"""

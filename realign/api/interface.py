"""`ModelInterface`: an algorithm, and what it declares about itself so that the runtime needs no knowledge of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from realign.api.microbatch import MicroBatchSpec
from realign.api.sample import SequenceSample
from realign.api.stats import Stats
from realign.settings import Settings

if TYPE_CHECKING:
    from realign.api.model import Model

METHODS = ("generate", "inference", "credit", "train_step")
"""Methods of an interface that an RPC can call."""
COMPONENT_KEYS = ("ref_logprobs", "prox_logprobs", "values", "dense_rewards", "baseline_rewards")
"""Keys that exist only for one component. Computing one that no component reads is a configuration error."""
COMPONENT_PREFIXES = ("ptx_", "teacher_")
"""Prefixes of further such keys."""


@dataclass(frozen=True)
class Keys:
    """What a method reads and writes under the current settings, by the interface's own names of the keys."""

    needs: Mapping[str, str] = field(default_factory=dict)
    """Keys that the graph must provide, each with the setting that asks for it; empty text: always needed."""
    uses: frozenset[str] = frozenset()
    """Keys that are read if the graph provides them."""
    writes: frozenset[str] | None = None
    """Keys that the method returns; None: not declared."""


class Weights(StrEnum):
    """Which weights a role works with, relative to the role that is trained."""

    any = "any"
    """No requirement."""
    frozen = "frozen"
    """Weights that training does not change, such as those of a reference policy."""
    live = "live"
    """The weights of the role that is trained, at their current version, such as those of a sampler."""


@dataclass(frozen=True)
class Plan:
    """Numbers that the runtime needs to know about a role: for checks, schedules and the launch table."""

    epochs: int = 1
    """Passes over the batch in each training step."""
    n_minibatches: int = 1
    """Optimizer steps per pass."""
    at_most: bool = False
    """Whether a training step may take fewer optimizer steps than `epochs * n_minibatches`."""
    first_training_step: int = 1
    """First step of the run in which the model is updated."""
    responses_per_prompt: int | None = None
    """Responses per prompt that the role samples or expects; None: any number."""
    longest_response: int = 0
    """Tokens after a prompt in the longest sequence that `generate` returns."""
    length_setting: str = "generation.max_new_tokens"
    """Field of the interface that `longest_response` follows from."""
    expected_response: int | None = None
    """Response length in tokens that settings of a trained role are relative to; None: no setting is."""
    temperature: float | None = None
    """Temperature of all log-probs of the role; None: it computes none that are compared with other roles'."""
    temperature_setting: str = "generation.temperature"
    """Field of the interface that `temperature` follows from."""
    sampler: str | None = None
    """One line about the sampling distribution; None: the role does not sample."""
    exact_sampling: bool = True
    """Whether the sampling distribution is the model's softmax at `temperature`, as probability ratios assume."""
    corrects_staleness: bool = False
    """Whether the loss accounts for tokens that an older policy sampled."""
    weights: Weights = Weights.any

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of one training step."""
        return self.epochs * self.n_minibatches


class RoleModel(StrEnum):
    """The model that a role gets if the config gives it none."""

    none = "none"
    """None; it works without a network."""
    start = "start"
    """A frozen copy of the weights that the owning role starts from."""
    shared = "shared"
    """The model of the owning role itself."""


@dataclass(frozen=True)
class Role:
    """A role that another role's settings ask for, with the defaults that apply where the config has none."""

    interface: ModelInterface
    model: RoleModel = RoleModel.start


@dataclass(frozen=True)
class Panel:
    """One chart of the learning curves: a title with the unit, and its metrics with their labels."""

    title: str
    metrics: Mapping[str, str]


class ModelInterface(Settings):
    """An algorithm: what is done with one model. Subclass it as a dataclass and implement the methods that you use.

    Each method receives the keys that its RPC declares as inputs, and returns exactly the keys that it declares as
    outputs. Everything else is optional: the defaults of the declarations below suit a simple interface.
    """

    needs_engine: ClassVar[bool] = True
    """Whether the role needs a model."""

    def generate(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Sample sequences from the model."""
        raise NotImplementedError(f"{type(self).__name__} has no generate")

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Compute something about the sequences: log-probs, values, rewards."""
        raise NotImplementedError(f"{type(self).__name__} has no inference")

    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> Stats:
        """Train the model on the batch, with any number of optimizer steps; return metrics."""
        raise NotImplementedError(f"{type(self).__name__} has no train_step")

    def credit(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Estimate the advantages and returns that several models learn from; needs no pass of the model."""
        raise NotImplementedError(f"{type(self).__name__} has no credit")

    def keys(self, method: str) -> Keys:
        """What `method` reads and writes; compared with the graph before anything is loaded.

        Raises:
            ValueError: the current settings rule out `method`; names the setting.
        """
        return Keys()

    def outputs(self) -> frozenset[str]:
        """What the interface asks of its model's `ModelOutput`; compared with the model's head."""
        return frozenset()

    def roles(self) -> Mapping[str, Role]:
        """Other roles that the current settings ask for, by name, with their defaults."""
        return {}

    def plan(self) -> Plan:
        """Numbers of the role under the current settings; override it if `train_step` takes several optimizer steps."""
        return Plan()

    def headline(self) -> tuple[str, ...]:
        """Metrics for the progress line, most important first; empty: the first ones that a step reports."""
        return ()

    def panels(self) -> tuple[Panel, ...]:
        """Charts of the learning curves; empty: one chart for each metric of the progress line."""
        return ()

    def describe(self, batch_prompts: int) -> dict[str, str]:
        """Rows of the launch table, by name; an empty value leaves its row out."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart (a KL coefficient, running moments); empty if there is nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, but got {sorted(state)}")

    def adopt(self, saved: Mapping[str, Any]) -> None:
        """Take over what belongs to the weights that the role starts from; called once after loading.

        `saved` is the `state_dict` of the earlier run's interface. What belongs to the weights is taken (the gain and
        bias of a reward model, the moments that a critic's outputs are scaled by), what belongs to that run is not (a
        KL coefficient). The default ignores `saved`.
        """

    def open(self) -> None:
        """Check and acquire what the interface needs (files, processes); called before any model is loaded."""

    def close(self) -> None:
        """Release what `open` acquired; called once, whenever the run ends."""


@runtime_checkable
class Calibratable(Protocol):
    """A reward interface whose gain and bias a run can set from measured scores."""

    gain: float
    bias: float

    @property
    def labels_are_numbers(self) -> bool:
        """Whether labels determine the scale of rewards, so that `label_scale` must see them."""
        ...

    def scores(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> Tensor:
        """[S] scores with the current gain and bias, before clipping."""
        ...

    def normalize(
        self, scores_S: Tensor, *, mean: float = 0.0, std: float = 1.0, reduce: Callable[[Tensor], Tensor]
    ) -> tuple[float, float]:
        """Set gain and bias so that these scores would have this mean and std; returns those that they had."""
        ...

    def label_scale(self, labels_S: Tensor) -> tuple[float, float]:
        """Mean and std that rewards should have before training, as far as the labels determine them; else (0, 1)."""
        ...


def implements(interface: type[ModelInterface], method: str) -> bool:
    """Whether the class overrides `method`, one of `METHODS`."""
    return getattr(interface, method) is not getattr(ModelInterface, method)


def method_of(interface: ModelInterface, name: str) -> Callable[[Model, SequenceSample, MicroBatchSpec], Any]:
    """Return the method of an interface that an RPC names, one of `METHODS`."""
    methods: dict[str, Callable[[Model, SequenceSample, MicroBatchSpec], Any]] = {
        "generate": interface.generate,
        "inference": interface.inference,
        "credit": interface.credit,
        "train_step": interface.train_step,
    }
    return methods[name]


def is_component_key(key: str) -> bool:
    """Whether a key exists only for a component that reads it."""
    return key in COMPONENT_KEYS or key.startswith(COMPONENT_PREFIXES)


__all__ = [
    "METHODS",
    "Calibratable",
    "Keys",
    "ModelInterface",
    "Panel",
    "Plan",
    "Role",
    "RoleModel",
    "Weights",
    "implements",
    "is_component_key",
    "method_of",
]

"""`ModelInterface`: an algorithm, and the declarations that keep the runtime independent of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from realign.api.generation import GenerationConfig
from realign.api.microbatch import MicroBatchSpec
from realign.api.sample import SequenceSample
from realign.api.stats import Stats
from realign.settings import Settings

if TYPE_CHECKING:
    from realign.api.model import Model

METHODS = ("generate", "inference", "credit", "train_step")
"""Methods of an interface that an RPC can call."""
_COMPONENT_KEYS = ("ref_logprobs", "ref_hidden", "prox_logprobs", "values", "dense_rewards", "baseline_rewards")
"""Keys that only an optional component reads. Computing an unread one is a configuration error."""
_COMPONENT_PREFIXES = ("ptx_", "teacher_")
"""Prefixes of further component keys."""


@dataclass(frozen=True)
class Keys:
    """Keys that a method reads and writes under the current settings, by their names in the interface."""

    needs: Mapping[str, str] = field(default_factory=dict)
    """Keys that the graph must provide, each with the setting that requires it; an empty text means always."""
    uses: frozenset[str] = frozenset()
    """Keys that the method reads if the graph provides them."""
    writes: frozenset[str] | None = None
    """Keys that the method returns; None: not declared."""
    reports: frozenset[str] = frozenset()
    """Further keys that the method returns, for metrics and samples. A graph may omit them from an RPC's outputs."""


class Weights(StrEnum):
    """Weights that a role requires, relative to the trained role."""

    any = "any"
    """No requirement."""
    frozen = "frozen"
    """Weights that training does not change, such as those of a reference policy."""
    live = "live"
    """The current weights of the trained role, such as those of a sampler."""


@dataclass(frozen=True)
class Plan:
    """Facts about a role that the runtime needs for checks, schedules and the launch table."""

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
    """Maximum number of tokens after the prompt in a sequence that `generate` returns; with `counts_prompt`, of the
    whole sequence."""
    counts_prompt: bool = False
    """Whether `longest_response` includes the prompt, because the role writes its own prompts."""
    length_setting: str = "generation.max_new_tokens"
    """Field of the interface that determines `longest_response`."""
    expected_response: int | None = None
    """Response length in tokens that settings of a trained role are relative to; None if no setting is."""
    temperature: float | None = None
    """Temperature of all log-probs of the role; None if other roles' log-probs are not compared with them."""
    temperature_setting: str = "generation.temperature"
    """Field of the interface that determines `temperature`."""
    generation: GenerationConfig | None = None
    """Sampling settings of `generate`, from which evaluations take their defaults; None if the role does not sample."""
    sampler: str | None = None
    """One-line description of the sampling distribution; None if the role does not sample."""
    exact_sampling: bool = True
    """Whether the sampling distribution is the model's softmax at `temperature`, as probability ratios assume."""
    corrects_staleness: bool = False
    """Whether the loss corrects for tokens sampled by an older policy version."""
    whole_batch: bool = False
    """Whether scoring relates the responses to different prompts, so that it needs the whole batch in one call."""
    weights: Weights = Weights.any
    single_requests: bool = False
    """Whether `generate` submits requests to the sampler one at a time, which does not work under torchrun."""

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of one training step."""
        return self.epochs * self.n_minibatches


class RoleModel(StrEnum):
    """Default model of a role without a model in the config."""

    none = "none"
    """No model; the role needs no network."""
    start = "start"
    """A frozen copy of the initial weights of the owning role."""
    shared = "shared"
    """The model of the owning role itself."""


@dataclass(frozen=True)
class Role:
    """A role that another role's settings require, with defaults for what the config does not set."""

    interface: ModelInterface
    model: RoleModel = RoleModel.start


@dataclass(frozen=True)
class Panel:
    """One chart of the learning curves: a title with the unit, and metrics with their labels."""

    title: str
    metrics: Mapping[str, str]


class ModelInterface(Settings):
    """An algorithm for one model. Subclass it as a dataclass and implement the methods that the graph calls.

    Each method receives the keys that its RPC declares as inputs, and returns exactly the keys that the RPC declares
    as outputs. All other methods are optional, with defaults for simple interfaces. A declaration that no setting
    changes may be a class attribute instead of a method: `OUTPUTS = frozenset({"logprobs"})`.
    """

    needs_engine: ClassVar[bool] = True
    """Whether the role needs a model."""
    reads_images: ClassVar[bool] = False
    """Whether the interface supports prompts with images (`realign.api.sample`)."""
    KEYS: ClassVar[Mapping[str, Keys]] = MappingProxyType({})
    """What `keys` returns, by method, if no setting changes it."""
    OUTPUTS: ClassVar[frozenset[str]] = frozenset()
    """What `outputs` returns, if no setting changes it; `HEADLINE` and `PANELS` likewise."""
    HEADLINE: ClassVar[tuple[str, ...]] = ()
    PANELS: ClassVar[tuple[Panel, ...]] = ()
    ALGORITHM_SETTINGS: ClassVar[tuple[str, ...]] = ()
    """Settings that make up the algorithm, such as `kl` or `reward.baseline`: `algorithm=NAME` resets them to the
    defaults of the class, and then sets what its file says. Read from source, so write the names as literals."""

    def generate(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Sample sequences from the model."""
        raise NotImplementedError(f"{type(self).__name__} does not implement generate")

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Compute log-probs, values or rewards of the sequences."""
        raise NotImplementedError(f"{type(self).__name__} does not implement inference")

    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> Stats:
        """Train the model on the batch, with any number of optimizer steps, and return metrics."""
        raise NotImplementedError(f"{type(self).__name__} does not implement train_step")

    def credit(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Estimate advantages and returns for several trained models, without a forward pass."""
        raise NotImplementedError(f"{type(self).__name__} does not implement credit")

    def keys(self, method: str) -> Keys:
        """Return the keys that `method` reads and writes. The runtime checks them before it loads models.

        Raises:
            ValueError: the current settings do not allow `method`. The message names the setting.
        """
        return self.KEYS.get(method, Keys())

    def outputs(self) -> frozenset[str]:
        """Return the outputs that the interface requires of `ModelOutput`. The runtime checks the model's head."""
        return self.OUTPUTS

    def roles(self) -> Mapping[str, Role]:
        """Return the other roles that the current settings require, by name, with their defaults."""
        return {}

    def plan(self) -> Plan:
        """Return the plan under the current settings. Override it if `train_step` takes several optimizer steps."""
        return Plan()

    def headline(self) -> tuple[str, ...]:
        """Return metrics for the progress line, most important first; empty: the first metrics of a step."""
        return self.HEADLINE

    def targets(self) -> dict[str, float]:
        """Return values that the settings ask for, by metric, such as the target of an adaptive KL coefficient."""
        return {}

    def panels(self) -> tuple[Panel, ...]:
        """Return charts of the learning curves; empty: one chart for each metric of the progress line."""
        return self.PANELS

    def describe(self, batch_prompts: int) -> dict[str, str]:
        """Return rows of the launch table, by name. A row with an empty value is omitted."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return state for checkpoints, such as a KL coefficient or running moments; empty if there is none."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state, but the checkpoint contains {sorted(state)}")

    def load_saved_state(self, saved: Mapping[str, Any]) -> None:
        """Restore interface state that belongs to the role's initial weights; called once after loading.

        `saved` is the `state_dict` of the interface in the run that saved the weights. Restore state that belongs to
        the weights, such as the gain and bias of a reward model or the moments that scale a critic's outputs. Ignore
        state that belongs to that run, such as a KL coefficient. The default ignores `saved`.
        """

    def open(self) -> None:
        """Check and acquire resources (files, processes). The runtime calls it before it loads models."""

    def close(self) -> None:
        """Release the resources of `open`. The runtime calls it once, when the run ends."""


@runtime_checkable
class Calibratable(Protocol):
    """A reward interface with a gain and a bias that a run can set from measured scores."""

    gain: float
    bias: float

    @property
    def labels_are_numbers(self) -> bool:
        """Whether labels determine the scale of rewards, so that `label_scale` needs them."""
        ...

    def scores(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> Tensor:
        """Compute scores [S] with the current gain and bias, before clipping."""
        ...

    def normalize(
        self, scores_S: Tensor, *, mean: float = 0.0, std: float = 1.0, reduce: Callable[[Tensor], Tensor]
    ) -> tuple[float, float]:
        """Set gain and bias so that these scores get this mean and std, and return their previous mean and std."""
        ...

    def label_scale(self, labels_S: Tensor) -> tuple[float, float]:
        """Return the mean and std of rewards before training as determined by the labels, or else (0, 1)."""
        ...


def implements(interface: type[ModelInterface], method: str) -> bool:
    """Return whether the class overrides `method`, one of `METHODS`."""
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
    """Return whether only an optional component reads a key (`_COMPONENT_KEYS`, `_COMPONENT_PREFIXES`)."""
    return key in _COMPONENT_KEYS or key.startswith(_COMPONENT_PREFIXES)

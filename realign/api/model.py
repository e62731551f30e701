"""The contracts between an algorithm and a machine: `ModelInterface`, `PipelinableEngine`, and what passes between.

Letters of shapes: T packed tokens, S sequences, V vocabulary. An interface knows no device, process, file or config;
an engine knows no algorithm.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from torch import Tensor

from realign.api.data import SequenceSample
from realign.api.generation import GenerationConfig
from realign.api.in_process_sampler import InProcessSampler
from realign.api.microbatch import MicroBatchSpec
from realign.api.sampler import Sampler
from realign.api.seeds import derive_seed
from realign.api.stats import Stat, Stats

if TYPE_CHECKING:
    from realign.api.dataflow import RPC


class ModelOutput(Protocol):
    """What one packed forward pass can give. Nothing of shape [T, V] is made unless `logits` is asked for."""

    def logprobs(self, *, temperature: float = 1.0, where_T: Tensor | None = None) -> Tensor:
        """[T] fp32: log p(token t | tokens before t) at `temperature`; 0 at first tokens and off `where_T`."""
        ...

    def logprobs_and_entropy(self, *, temperature: float = 1.0, where_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """([T], [T]) fp32: log-probs, and the entropy (nats) of the distribution that token t was drawn from."""
        ...

    @property
    def logits(self) -> Tensor:
        """[T, V] fp32: logits after reading token t (they predict t + 1). Costs T x V memory."""
        ...

    def values(self) -> Tensor:
        """[T] fp32, of a model with a scalar head: value of the state before token t; 0 at first tokens."""
        ...

    def scores(self) -> Tensor:
        """[S] fp32, of a model with a scalar head: its output at the last token of each sequence; 0 if empty."""
        ...


PostHook: TypeAlias = Callable[[ModelOutput, SequenceSample], SequenceSample]
LossFn: TypeAlias = Callable[[ModelOutput, SequenceSample], tuple[Tensor, Mapping[str, Stat | tuple[Tensor, Tensor]]]]
LossWeightFn: TypeAlias = Callable[[SequenceSample], Tensor]
StepIf: TypeAlias = Callable[[Stats], bool]


class PipelinableEngine(Protocol):
    """A machine for one network. It cuts, packs, moves and shards; it knows no algorithm."""

    @property
    def trainable(self) -> bool:
        """Whether `train_batch` may be called (an optimizer was configured)."""
        ...

    @property
    def outputs(self) -> frozenset[str]:
        """What its `ModelOutput` can give: "logprobs" of a language model, "values" and "scores" of a scalar head."""
        ...

    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        """Run without gradient; return the keys that `post_hook` added to each micro-batch, in the order of `data`."""
        ...

    def train_batch(
        self,
        data: SequenceSample,
        mb_spec: MicroBatchSpec,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        step_if: StepIf | None = None,
    ) -> Stats:
        """One optimizer step on the whole of `data`.

        `loss_fn` returns a sum; the engine divides it by `loss_weight_fn(data)` summed over data-parallel ranks, before
        the first backward pass. It may be called for several micro-batches at a time, in threads, and so must not write
        what its calls share. A weight of 0, a zero gradient or a non-finite loss or gradient makes no step; nor does
        `step_if`, asked with the metrics of the whole batch over all ranks, when it says False (`vetoed_steps`): no
        weight, moment or schedule moves then.

        Returns:
            The metrics of `loss_fn`, merged, and the engine's own: `loss`, `grad_norm`, `lr`, `skipped_steps`, ...
        """
        ...

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """Sample `config.n` responses for each prompt of key `prompt_ids`, one call at a time.

        `Model.sampler` calls this; interfaces call `Model.sampler`. The random numbers of a response are a function of
        (seed, id, response index) alone.

        Returns:
            A sample of the same ids: `input_ids`, `prompt_mask`, `loss_mask`, `logprobs` [T] and `truncated` [S] bool.
        """
        ...

    def reduce(self, x: Tensor) -> Tensor:
        """Sum over data-parallel ranks; the identity in one process."""
        ...

    def start_step(self, version: int) -> None:
        """Tell the engine how many training steps (rollout batches) lie behind; schedules counted in them follow."""
        ...

    def save(self, path: Path) -> None:
        """Write an ordinary Hugging Face folder: safetensors, config and tokenizer."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What training changes (weights, moments, counts), as plain values and tensors."""
        ...

    def fixed_weights(self) -> dict[str, Any]:
        """The weights that it does not change, which `state_dict` leaves out; empty where all of them train."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], *, weights_only: bool = False) -> None:
        """Take back what `state_dict` gave; with `weights_only`, the optimizer stays as it is."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """All weights of the network by name, each whole and once, a value head's after "value_head.".

        They may be views: what trains the network changes them.
        """
        ...

    def load_weights(self, weights: Mapping[str, Tensor], mix: float = 1.0) -> None:
        """Make each weight (1 - mix) of itself plus `mix` of the one given; 1, the default, copies bit by bit.

        Raises:
            ValueError: other names or shapes than `weights()` has, or `mix` is not in (0, 1].
        """
        ...


@dataclass
class Model:
    """A role of the graph ("actor", "ref", ...): an engine, its tokenizer, and how often it was trained.

    Attributes:
        name: the role.
        engine: the machine; None for a role that needs no network (a rule that computes rewards).
        tokenizer: turns ids into text and back.
        seed: the run's root seed; derive others with `call_seed`.
        version: training steps (calls of `train_step`) done so far; advanced by the runtime. Of a role that takes its
            weights from another (`Sync`): the version of the latest ones that are in them, wholly or in part.
        saved: what the interface of an earlier run kept with these weights (`ModelInterface.adopt`).
        views: roles that share this model and have no weights of their own; their version follows.
        saved_views: what the interfaces of such roles kept with these weights, by role.
        lead: makes a call that one process alone may make, such as of a world outside, and gives what came of it to
            every process of the run; where there is one process, just makes it.
        external_sampler: samples for the role instead of its engine, such as a client of a server; None: the engine.
    """

    name: str
    engine: PipelinableEngine | None
    tokenizer: Any = None
    seed: int = 0
    version: int = 0
    saved: Mapping[str, Any] = field(default_factory=dict)
    views: list[Model] = field(default_factory=list)
    saved_views: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    lead: Callable[[Callable[[], Any]], Any] = operator.call
    external_sampler: Sampler | None = None

    def __post_init__(self) -> None:
        self._in_process: InProcessSampler | None = None

    @property
    def machine(self) -> PipelinableEngine:
        """The engine, or a clear error for a role that has none."""
        if self.engine is None:
            raise ValueError(f"role {self.name!r} has no model: give it one under models.{self.name}")
        return self.engine

    @property
    def sampler(self) -> Sampler:
        """What samples for this role: the external sampler, or else the engine.

        Raises:
            ValueError: the role has neither.
        """
        if self.external_sampler is not None:
            return self.external_sampler
        if self._in_process is None or self._in_process.engine is not self.engine:
            self._in_process = InProcessSampler(self.machine, version=self.version)
        if self._in_process.version != self.version:
            self._in_process.update(self.machine, self.version)
        return self._in_process

    def advance(self) -> None:
        """Count one training step, and let schedules and the external sampler follow."""
        self.move_to(self.version + 1)

    def move_to(self, version: int) -> None:
        """Have this version, with all views; call it after every change of the weights.

        Schedules of the engine follow, and an external sampler receives the weights.
        """
        self.version = version
        for view in self.views:
            view.version = version
        self.machine.start_step(version)
        if self.external_sampler is not None:
            self.external_sampler.update(self.machine, version)

    def call_seed(self, purpose: str) -> int:
        """A seed that is a pure function of the run's seed, the role, `purpose` and the version."""
        return derive_seed(self.seed, self.name, purpose, self.version)


class ModelInterface:
    """An algorithm: what is done with one model. Subclass it as a dataclass and implement the methods that you use.

    Each method gets the keys that its RPC declared, and returns exactly the keys that its RPC declared.
    """

    needs_engine: ClassVar[bool] = True
    length_setting: ClassVar[str] = "generation.max_new_tokens"
    """The field that `longest_response` follows from, for messages."""

    def generate(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Sample sequences from the model."""
        raise NotImplementedError(f"{type(self).__name__} has no generate")

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Compute something about the sequences: log-probs, values, rewards."""
        raise NotImplementedError(f"{type(self).__name__} has no inference")

    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> Stats:
        """Train the model on the batch (any number of optimizer steps); return metrics."""
        raise NotImplementedError(f"{type(self).__name__} has no train_step")

    def credit(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Turn rewards into what several models learn from (advantages, returns); needs no pass of the model."""
        raise NotImplementedError(f"{type(self).__name__} has no credit")

    @property
    def longest_response(self) -> int:
        """Tokens that can follow a prompt in what `generate` returns: by the field `generation`, where there is one."""
        generation = getattr(self, "generation", None)
        return generation.max_new_tokens if isinstance(generation, GenerationConfig) else 0

    def required_inputs(self, method: str) -> frozenset[str]:
        """Keys that `method` cannot do without under the present settings; compared with the graph before loading."""
        return frozenset()

    def written_outputs(self, method: str) -> frozenset[str] | None:
        """Keys that `method` writes under the present settings, compared with the graph before loading; None: any."""
        return None

    def needed_outputs(self) -> frozenset[str]:
        """What the interface asks of its model's `ModelOutput`; compared with the model's head once it is loaded."""
        return frozenset()

    def check(self, rpc: RPC) -> None:
        """Refuse a call under which a setting would do harm or have no effect; made before anything is loaded.

        Raises:
            ValueError: names the setting, and the flag of the graph that it does not go with.
        """

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart (a KL coefficient, running moments); empty when there is nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, but got {sorted(state)}")

    def adopt(self, saved: Mapping[str, Any]) -> None:
        """Take over what an earlier run kept with the weights that the role starts from; called once after loading.

        `saved` is the `state_dict` of that run's interface. What belongs to the weights is taken (the gain and bias of
        a reward model, the moments that a critic's outputs are in units of), what belongs to the run is not (a KL
        coefficient). Interfaces ignore it unless they say otherwise.
        """

    def open(self) -> None:
        """Check and acquire what the interface needs (files, processes); called before any model is loaded."""

    def close(self) -> None:
        """Release what `open` acquired; called once, when the run ends, however it ends."""


METHODS = ("generate", "inference", "credit", "train_step")


def implements(interface: type[ModelInterface], method: str) -> bool:
    """Whether the class overrides `method`, one of `METHODS`."""
    return getattr(interface, method) is not getattr(ModelInterface, method)


__all__ = [
    "METHODS",
    "GenerationConfig",
    "LossFn",
    "LossWeightFn",
    "Model",
    "ModelInterface",
    "ModelOutput",
    "PipelinableEngine",
    "PostHook",
    "StepIf",
    "derive_seed",
    "implements",
]

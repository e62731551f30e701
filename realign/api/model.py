"""The contract of a machine (`PipelinableEngine`, `ModelOutput`), the model of a role, and how one is loaded.

Letters of shapes: T packed tokens, S sequences, V vocabulary. An interface knows no device, process, file or config;
an engine knows no algorithm.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from realign.api.generation import GenerationConfig
from realign.api.in_process_sampler import InProcessSampler
from realign.api.microbatch import MicroBatchSpec
from realign.api.sample import SequenceSample
from realign.api.sampler import Sampler
from realign.api.seeds import derive_seed
from realign.api.stats import LossStats, Stats, Sum, merge_stats


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
LossFn: TypeAlias = Callable[[ModelOutput, SequenceSample], tuple[Tensor, LossStats]]
LossWeightFn: TypeAlias = Callable[[SequenceSample], Tensor]
StepIf: TypeAlias = Callable[[Stats], bool]
Forward: TypeAlias = Callable[[SequenceSample, MicroBatchSpec, PostHook], SequenceSample]
"""The type of `PipelinableEngine.forward`."""


class PipelinableEngine(Protocol):
    """A machine for one network. It cuts, packs, moves and shards; it knows no algorithm.

    Inherit from it: the members at the end have defaults that suit an engine in one process.
    """

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

    @property
    def positions(self) -> int | None:
        """Longest sequence in tokens that the network can process; None: no limit, or unknown."""
        return None

    @property
    def data_ranks(self) -> int:
        """Number of parts into which the engine's processes cut a batch."""
        return 1

    @property
    def data_rank(self) -> int:
        """The part of a batch that this process computes, from 0."""
        return 0

    def forward_part(self, part: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        """Run `forward` on the prompts of this process; with one process those are the whole batch."""
        return self.forward(part, mb_spec, post_hook)

    def generate_part(self, part: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """Run `generate` for the prompts of this process; with one process those are the whole batch."""
        return self.generate(part, config, seed=seed)

    def reference(self, layers: int | None = None) -> Forward:
        """Return a `forward` that computes with the weights as they are now, whatever is trained later.

        Args:
            layers: number of top layers to copy; None: as many as are trained.

        Raises:
            ValueError: the engine cannot keep its starting weights beside the trained ones.
        """
        raise ValueError(f"{type(self).__name__} has no reference branch")

    def measure(self, data: SequenceSample, mb_spec: MicroBatchSpec, loss_fn: LossFn) -> Stats:
        """Return the metrics of `loss_fn` on `data`, and its sum as metric `LOSS_SUM`, without a gradient."""
        return measured(self.forward, data, mb_spec, loss_fn)


LOSS_SUM = "sum of the loss"
"""The metric of `PipelinableEngine.measure` that no loss function has."""


def measured(forward: Forward, data: SequenceSample, mb_spec: MicroBatchSpec, loss_fn: LossFn) -> Stats:
    """Return the metrics of `loss_fn` on `data` and its sum as `LOSS_SUM`, computed by `forward` without a gradient."""
    losses: list[Tensor] = []
    metrics: list[Any] = []  # plain (sum, count) pairs are merged too

    def post_hook(output: ModelOutput, mb: SequenceSample) -> SequenceSample:
        loss, stats = loss_fn(output, mb)
        losses.append(loss.double())
        metrics.append(stats)
        return mb.with_sequences(measured=torch.ones(mb.n_sequences, device=loss.device))  # a hook adds a key

    forward(data, mb_spec, post_hook)
    return {**merge_stats(metrics), LOSS_SUM: Sum(torch.stack(losses).sum() if losses else torch.zeros(()))}


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


@dataclass(frozen=True)
class ModelFacts:
    """What is known about a model before it is loaded; None: unknown."""

    path: str | None = None
    """Folder or hub name of the weights."""
    device: str | None = None
    """Device that the config asks for, such as "cuda:0" or "auto"."""
    outputs: frozenset[str] | None = None
    """See `PipelinableEngine.outputs`."""
    trainable: bool | None = None
    """Whether an optimizer is configured."""
    branches: bool | None = None
    """Whether the starting weights can be kept inside the trained model: it trains adapters or its top layers only."""
    rate_ends: int | None = None
    """Number of steps after which the learning rate is 0; None: it never is."""
    rate_unit: str = "optimizer_step"
    """The steps that `rate_ends` counts: optimizer_step or train_step."""


class ModelSpec(ABC):
    """Loads the model of a role, such as `realign.engines.TransformersModel`. Inherit from it and implement `load`."""

    @abstractmethod
    def load(self, name: str, *, seed: int) -> Model:
        """Load the model of the role `name`; `seed` is the run's root seed."""

    def check(self, name: str) -> None:  # noqa: B027 (optional)
        """Check the spec of the role `name` before any weights are read.

        Raises:
            ValueError: names the key, the value found and what is valid.
        """

    def facts(self) -> ModelFacts:
        """Return what is known without loading the model; used for checks, placement and the launch table."""
        return ModelFacts()

    def frozen_start(self, role: str) -> ModelSpec:
        """Return the spec of a frozen copy of the weights that this spec of `role` loads, such as a reference policy.

        The default is the spec itself, which suits a spec that configures no training.
        """
        return self

    def for_sampling(self) -> ModelSpec:
        """Return the spec of a copy that only samples, for asynchronous rollout."""
        return self


__all__ = [
    "LOSS_SUM",
    "Forward",
    "GenerationConfig",
    "LossFn",
    "LossWeightFn",
    "Model",
    "ModelFacts",
    "ModelOutput",
    "ModelSpec",
    "PipelinableEngine",
    "PostHook",
    "StepIf",
    "derive_seed",
    "measured",
]

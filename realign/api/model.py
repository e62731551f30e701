"""The engine contract (`PipelinableEngine`, `ModelOutput`), the model of a role, and how a spec loads it.

Shapes: T packed tokens, S sequences, V vocabulary. Interfaces are independent of devices, processes, files and the
config. Engines are independent of algorithms.
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
    """Outputs of one packed forward pass. Only `logits` allocates a tensor of shape [T, V]."""

    def logprobs(self, *, temperature: float = 1.0, where_T: Tensor | None = None) -> Tensor:
        """Return log p(token t | tokens before t) at `temperature`: [T] fp32.

        The result is 0 at first tokens and where `where_T` is False.
        """
        ...

    def logprobs_and_entropy(self, *, temperature: float = 1.0, where_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return log-probs of the tokens and the entropy (nats) of their distributions: ([T], [T]) fp32."""
        ...

    @property
    def logits(self) -> Tensor:
        """[T, V] fp32: logits after token t, which predict token t + 1. Needs T x V memory."""
        ...

    def values(self) -> Tensor:
        """Return the value of the state before token t, from a scalar head: [T] fp32; 0 at first tokens."""
        ...

    def scores(self) -> Tensor:
        """Return the output of a scalar head at the last token of each sequence: [S] fp32; 0 if it is empty."""
        ...


PostHook: TypeAlias = Callable[[ModelOutput, SequenceSample], SequenceSample]
LossFn: TypeAlias = Callable[[ModelOutput, SequenceSample], tuple[Tensor, LossStats]]
LossWeightFn: TypeAlias = Callable[[SequenceSample], Tensor]
StepIf: TypeAlias = Callable[[Stats], bool]
Forward: TypeAlias = Callable[[SequenceSample, MicroBatchSpec, PostHook], SequenceSample]
"""The type of `PipelinableEngine.forward`."""


class PipelinableEngine(Protocol):
    """Runs one network: cuts batches, packs them, moves them to devices and shards them. Contains no algorithm.

    Inherit from it. The members at the end have defaults for single-process engines.
    """

    @property
    def trainable(self) -> bool:
        """Whether callers may call `train_batch`, which requires an optimizer."""
        ...

    @property
    def outputs(self) -> frozenset[str]:
        """Outputs of its `ModelOutput`: "logprobs" of a language model, "values" and "scores" of a scalar head."""
        ...

    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        """Run without gradients, and return the keys that `post_hook` added, in the order of `data`."""
        ...

    def train_batch(
        self,
        data: SequenceSample,
        mb_spec: MicroBatchSpec,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        step_if: StepIf | None = None,
    ) -> Stats:
        """Take one optimizer step on all of `data`.

        `loss_fn` returns a sum. The engine divides it by `loss_weight_fn(data)`, summed over data-parallel ranks
        before the first backward pass. The engine may call `loss_fn` for several micro-batches concurrently, in
        threads, so its calls must not write shared state.

        The engine skips the step if the weight or the gradient is 0, or if the loss or the gradient is not finite. It
        also skips the step if `step_if` returns False (`vetoed_steps`). `step_if` receives the metrics of the whole
        batch over all ranks. A skipped step changes no weight, optimizer state or schedule.

        Returns:
            The merged metrics of `loss_fn` and those of the engine: `loss`, `grad_norm`, `lr`, `skipped_steps`, ...
        """
        ...

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """Sample `config.n` responses for each prompt of key `prompt_ids`, one call at a time.

        `Model.sampler` calls this; interfaces call `Model.sampler`. The random numbers of a response depend only on
        (seed, id, response index).

        Returns:
            A sample of the same ids: `input_ids`, `prompt_mask`, `loss_mask`, `logprobs` [T] and `truncated` [S]
            bool.
        """
        ...

    def reduce(self, x: Tensor) -> Tensor:
        """Sum over data-parallel ranks. With one process, return `x`."""
        ...

    def start_step(self, version: int) -> None:
        """Set the number of completed training steps (rollout batches), which schedules counted in them follow."""
        ...

    def save(self, path: Path) -> None:
        """Write a Hugging Face folder: safetensors, config and tokenizer."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state that training changes (weights, optimizer moments, counts) as plain values and tensors."""
        ...

    def fixed_weights(self) -> dict[str, Any]:
        """Return the weights that training does not change, which `state_dict` omits; empty if all weights train."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], *, weights_only: bool = False) -> None:
        """Restore what `state_dict` returned. With `weights_only`, leave the optimizer unchanged."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """Return all weights of the network by name, unsharded and without duplicates.

        The names of a value head's weights start with "value_head.". The tensors may be views, which training
        changes.
        """
        ...

    def load_weights(self, weights: Mapping[str, Tensor], mix: float = 1.0) -> None:
        """Set each weight to (1 - mix) * old + mix * new. The default of 1 copies bitwise.

        Raises:
            ValueError: names or shapes differ from those of `weights()`, or `mix` is not in (0, 1].
        """
        ...

    @property
    def positions(self) -> int | None:
        """Context window in tokens; None if it is unlimited or unknown."""
        return None

    @property
    def data_ranks(self) -> int:
        """Number of parts into which the engine's processes cut a batch."""
        return 1

    @property
    def data_rank(self) -> int:
        """Index of the part of a batch that this process computes, from 0."""
        return 0

    def forward_part(self, part: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        """Run `forward` on the prompts of this process. With one process, these are the whole batch."""
        return self.forward(part, mb_spec, post_hook)

    def generate_part(self, part: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """Run `generate` for the prompts of this process. With one process, these are the whole batch."""
        return self.generate(part, config, seed=seed)

    def reference(self, layers: int | None = None) -> Forward:
        """Return a `forward` that always uses the current weights, unaffected by later training.

        Args:
            layers: number of top layers to copy; None copies all layers that are trained.

        Raises:
            ValueError: the engine cannot keep its initial weights in addition to the trained ones.
        """
        raise ValueError(f"{type(self).__name__} has no reference branch")

    def measure(self, data: SequenceSample, mb_spec: MicroBatchSpec, loss_fn: LossFn) -> Stats:
        """Return the metrics of `loss_fn` on `data`, and its sum as metric `LOSS_SUM`, without gradients."""
        return measured(self.forward, data, mb_spec, loss_fn)


LOSS_SUM = "sum of the loss"
"""The metric that `PipelinableEngine.measure` adds to those of the loss function."""


def measured(forward: Forward, data: SequenceSample, mb_spec: MicroBatchSpec, loss_fn: LossFn) -> Stats:
    """Run `loss_fn` on `data` with `forward`, and return its metrics and its sum as metric `LOSS_SUM`."""
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
    """A role of the graph ("actor", "ref", ...): its engine, tokenizer and policy version.

    Attributes:
        name: name of the role.
        engine: engine of the role; None for a role without a network, such as a reward rule.
        tokenizer: converts between text and token ids.
        seed: root seed of the run. `call_seed` derives other seeds from it.
        version: number of completed training steps (calls of `train_step`), advanced by the runtime. For a role
            synced from another role (`Sync`): the version of the latest weights that its own weights include.
        saved: interface state that an earlier run saved with these weights (`ModelInterface.adopt`).
        views: roles that share this model instead of having separate weights. They have the same version.
        saved_views: saved interface state of these roles, by role.
        lead: runs a call on rank 0 only, such as one with external side effects, and broadcasts its result to all
            ranks. With one process, it just runs the call.
        external_sampler: sampler that replaces the engine's, such as a client of a server; None: the engine samples.
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
        """The engine.

        Raises:
            ValueError: the role has none.
        """
        if self.engine is None:
            raise ValueError(f"role {self.name!r} has no model. Set models.{self.name}")
        return self.engine

    @property
    def sampler(self) -> Sampler:
        """Sampler of this role: the external sampler, or else the engine's.

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
        """Advance the version by one training step, and update schedules and the external sampler."""
        self.move_to(self.version + 1)

    def move_to(self, version: int) -> None:
        """Set the version of this model and its views. Call it after every change of the weights.

        Updates the engine's schedules, and sends the weights to the external sampler.
        """
        self.version = version
        for view in self.views:
            view.version = version
        self.machine.start_step(version)
        if self.external_sampler is not None:
            self.external_sampler.update(self.machine, version)

    def call_seed(self, purpose: str) -> int:
        """Derive a seed from the run's seed, the role, `purpose` and the version."""
        return derive_seed(self.seed, self.name, purpose, self.version)


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model that are available before it is loaded. None means unknown."""

    path: str | None = None
    """Folder or hub name of the weights."""
    device: str | None = None
    """Device in the config, such as "cuda:0" or "auto"."""
    outputs: frozenset[str] | None = None
    """See `PipelinableEngine.outputs`."""
    trainable: bool | None = None
    """Whether an optimizer is configured."""
    branches: bool | None = None
    """Whether the trained model can also keep its initial weights (it trains only adapters or its top layers)."""
    rate_ends: int | None = None
    """Number of steps after which the learning rate is 0; None if it never reaches 0."""
    rate_unit: str = "optimizer_step"
    """Unit of `rate_ends`: optimizer_step or train_step."""


class ModelSpec(ABC):
    """Loads the model of a role, such as `realign.engines.TransformersModel`. Subclasses implement `load`."""

    @abstractmethod
    def load(self, name: str, *, seed: int) -> Model:
        """Load the model of the role `name`; `seed` is the run's root seed."""

    def check(self, name: str) -> None:  # noqa: B027 (optional)
        """Check the spec of the role `name` before any weights are read.

        Raises:
            ValueError: the spec is invalid. The message names the key, its value and the valid values.
        """

    def facts(self) -> ModelFacts:
        """Return facts for checks, placement and the launch table, without loading the model."""
        return ModelFacts()

    def frozen_start(self, role: str) -> ModelSpec:
        """Return the spec of a frozen copy of the weights that this spec of `role` loads, such as a reference policy.

        The default implementation returns the spec itself, for specs that configure no training.
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

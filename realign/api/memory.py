"""Memory estimate of a role before its weights are read: the work of its calls, and the bytes that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable


class MemoryChoice(StrEnum):
    """A setting of a model that trades time for memory. The value is its name in the launch table."""

    checkpointing = "gradient checkpointing"
    """Whether training recomputes layers."""
    sampling_copy = "copy for sampling kept"
    """Whether `RoleMemory.sampling_copy` stays between rollouts."""


@dataclass(frozen=True)
class MemoryWork:
    """What the calls of a role do in one step, as far as it determines memory. Sizes are upper bounds.

    Attributes:
        trains: whether an RPC trains the role.
        scores: whether an RPC runs forward passes without gradient.
        samples: whether the role's engine samples responses.
        tokens: packed tokens of one micro-batch; concurrent micro-batches on a CPU divide them.
        optimizer_step_tokens: packed tokens of one optimizer step.
        prompts: prompts that are sampled together.
        sequences: responses to these prompts.
        prompt: longest prompt, in tokens.
        response: longest response, in tokens.
        sequence: longest sequence of training and scoring, in tokens; 0: a prompt with its response.
        references: for each frozen reference branch over this model, its number of top layers; None copies as many
            layers as train.
        ranks: number of processes among which the model is sharded.
        free: free memory of the device in bytes; None if unknown.
    """

    trains: bool
    scores: bool
    samples: bool
    tokens: int
    optimizer_step_tokens: int
    prompts: int = 0
    sequences: int = 0
    prompt: int = 0
    response: int = 0
    sequence: int = 0
    references: tuple[int | None, ...] = ()
    ranks: int = 1
    free: int | None = None

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence in training and scoring, at least 1."""
        return max(1, self.sequence or self.prompt + self.response)


@dataclass(frozen=True)
class RoleMemory:
    """Bytes that the model of a role needs on its device. Every number is an estimate.

    Attributes:
        device: device of the model, such as `cpu` or `cuda:0`.
        weights: master weights, adapters and value head.
        references: frozen copies of top layers for reference branches.
        moments: optimizer state.
        average: moving average of the weights.
        sampling_copy: copy of a sharded model from which it samples, if it stays between rollouts.
        gradients: accumulated gradients, and those of concurrent micro-batches.
        casts: copies of weights during a pass: bf16 casts, and weights that FSDP has gathered.
        activations: tensors that the backward pass of the concurrent micro-batches reads.
        head: a chunk of logits, and the gradient of the language-model head.
        scoring: tensors of a forward pass without gradient, including its chunk of logits.
        cache: KV cache of a rollout.
        rollout_weights: copies of the weights from which a rollout samples, and which it frees.
        rollout_work: prefill, logits and other tensors of a rollout.
        accumulates: whether an optimizer step has several micro-batches, so that gradients and activations coexist.
    """

    device: str
    weights: int
    references: int = 0
    moments: int = 0
    average: int = 0
    sampling_copy: int = 0
    gradients: int = 0
    casts: int = 0
    activations: int = 0
    head: int = 0
    scoring: int = 0
    cache: int = 0
    rollout_weights: int = 0
    rollout_work: int = 0
    accumulates: bool = True

    @property
    def kept(self) -> int:
        """Memory between calls."""
        return self.weights + self.references + self.moments + self.average + self.sampling_copy

    @property
    def training(self) -> int:
        """Memory of an optimizer step, beyond `kept`. A single micro-batch frees activations as gradients appear."""
        passing = self.activations + self.head
        return self.casts + (self.gradients + passing if self.accumulates else max(self.gradients, passing))

    @property
    def rollout(self) -> int:
        """Memory of a rollout, beyond `kept`."""
        return self.rollout_work + self.cache + self.rollout_weights

    @property
    def computing(self) -> int:
        """Memory of training and scoring, beyond `kept`."""
        return max(self.training, self.scoring + self.casts if self.scoring else 0)

    @property
    def passing(self) -> int:
        """Largest memory of one call, beyond `kept`."""
        return max(self.computing, self.rollout)


@runtime_checkable
class EstimatesMemory(Protocol):
    """A model spec that can estimate the memory of its role without reading weights."""

    def memory(self, name: str, work: MemoryWork) -> RoleMemory:
        """Estimate the memory of the role `name`.

        Raises:
            ValueError: the config of the model cannot be read.
        """
        ...


@runtime_checkable
class LimitsPrompts(Protocol):
    """A data spec with a length limit for prompts."""

    @property
    def max_prompt_tokens(self) -> int | None:
        """Longest prompt in tokens; None: no limit."""
        ...


@runtime_checkable
class LimitsSequences(Protocol):
    """A data spec with a length limit for whole sequences."""

    @property
    def max_tokens(self) -> int | None:
        """Longest sequence in tokens; None: no limit."""
        ...

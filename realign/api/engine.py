"""The engine contract: `PipelinableEngine` runs a network and returns a `ModelOutput` of each packed forward pass.

Shapes: T packed tokens, S sequences, V vocabulary. Engines are independent of algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from realign.api.generation import GenerationConfig
from realign.api.microbatch import MicroBatchSpec
from realign.api.q_values import QValues
from realign.api.sample import SequenceSample
from realign.api.stats import LossStats, Stats, Sum, merge_stats
from realign.api.target_heads import head_in, one_token, with_head
from realign.functional import LMHead


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
    def lm_head(self) -> LMHead:
        """The head that maps hidden states to logits."""
        ...

    def hidden_states(self, *, where_T: Tensor | None = None) -> Tensor:
        """Return the last hidden state before token t, from which the head predicts token t: [T, H].

        The result is 0 at first tokens and where `where_T` is False.
        """
        ...

    def divergence(
        self,
        role: str,
        hidden_TH: Tensor,
        *,
        beta: float = 1.0,
        temperature: float = 1.0,
        where_T: Tensor | None = None,
    ) -> Tensor:
        """Return the divergence from the distribution of another role over the whole vocabulary: [T] fp32, in nats.

        The result is 0 at first tokens and where `where_T` is False.

        Args:
            role: role of the other model, whose head the engine received by `use_heads`.
            hidden_TH: `hidden_states` of the other model, detached.
            beta: 0 is the forward KL, KL(other || this); 1 is the reverse KL, KL(this || other). Between them it is
                the weight of the other model in the mixture of the Jensen-Shannon divergence.
            temperature: temperature of both distributions.
            where_T: [T] bool: the tokens to compute.
        """
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

    def q_values(self, *, where_T: Tensor | None = None) -> QValues:
        """Return the action values of the tokens, from Q heads; 0 at first tokens and where `where_T` is False."""
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
        """Outputs of its `ModelOutput`: "logprobs" of a language model, "values" and "scores" of a scalar head.

        A model with Q heads also has "q_values".
        """
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

    def check_router_replay(self) -> None:
        """Check that `generate` can record choices of experts, and that forward passes replay them.

        The choices are the key `router_experts`, see `GenerationConfig.router_replay`.

        Raises:
            ValueError: the engine does not support it.
        """
        raise ValueError(f"{type(self).__name__} does not support generation.router_replay=true")

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """Sample `config.n` responses for each prompt of key `prompt_ids`, one call at a time.

        `Model.sampler` calls this; interfaces call `Model.sampler`. The random numbers of a response depend only on
        (seed, id, response index).

        Returns:
            A sample of the same ids: `input_ids`, `prompt_mask`, `loss_mask`, `logprobs` [T] and `truncated` [S]
            bool; with `config.router_replay` also `router_experts`.
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

    def lm_head(self) -> LMHead:
        """Return the language-model head, detached, for losses of other roles over the whole vocabulary.

        It is a copy, or shares the memory of the weights (`head_is_live`).
        """
        return copied_head(self.forward)

    @property
    def head_is_live(self) -> bool:
        """Whether the result of `lm_head` follows later changes of the weights."""
        return False

    def use_heads(self, heads: Mapping[str, LMHead]) -> None:
        """Set the heads of other roles, by role, for `ModelOutput.divergence`.

        Raises:
            ValueError: the engine has no losses over the whole vocabulary.
        """
        raise ValueError(f"{type(self).__name__} has no losses over the whole vocabulary")

    @property
    def positions(self) -> int | None:
        """Context window in tokens; None if it is unlimited or unknown."""
        return None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End tokens of the model, at which `generate` stops unless the request names others; empty if unknown."""
        return ()

    @property
    def reads_images(self) -> bool:
        """Whether the network reads the images of prompts (`realign.api.sample`)."""
        return False

    @property
    def encoder_decoder(self) -> bool:
        """Whether an encoder reads the prompt, so that the network predicts only tokens of one response."""
        return False

    def describe(self) -> str:
        """Return size and device of the model, such as `135M parameters on cuda:0`; empty if they are unknown."""
        return ""

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


def copied_head(forward: Forward) -> LMHead:
    """Return a copy of the language-model head of an engine, which `forward` may run in other processes."""
    return head_in(forward(one_token(), MicroBatchSpec(), _head_of))


def _head_of(output: ModelOutput, mb: SequenceSample) -> SequenceSample:
    return with_head(mb, output.lm_head)


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


__all__ = [
    "LOSS_SUM",
    "Forward",
    "LossFn",
    "LossWeightFn",
    "ModelOutput",
    "PipelinableEngine",
    "PostHook",
    "StepIf",
    "copied_head",
    "measured",
]

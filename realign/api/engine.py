"""The engine contract: `PipelinableEngine` runs a network and returns a `ModelOutput` of each packed forward pass.

Shapes: T packed tokens, S sequences, V vocabulary. Engines are independent of algorithms.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from realign.api.generation import GenerationConfig
from realign.api.lengths import Lengths
from realign.api.microbatch import MicroBatchSpec
from realign.api.sample import TOKENS, SequenceSample
from realign.api.stats import LossStats, Stats, Sum, merge_stats
from realign.functional import LMHead


class QValues(NamedTuple):
    """Action values of the tokens of a batch, from K Q heads. State t is the state before token t."""

    online_KT: Tensor
    """[K, T] fp32: Q_k(state t, token t), differentiable."""
    target_T: Tensor
    """[T] fp32: the smallest of the K target heads' values, detached."""
    logprobs_KT: Tensor
    """[K, T] fp32: log softmax(Q_k(state t, .)) at token t, differentiable; the negative of the CQL loss."""


class ModelOutput(Protocol):
    """Outputs of one packed forward pass. Only `logits` allocates a tensor of shape [T, V].

    If the batch has the key `sampling_mask`, the distributions of log-probs, entropies and divergences are normalized
    over the recorded tokens. `logits` are unchanged.
    """

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
Agree: TypeAlias = Callable[[bool], bool]
"""Receives whether the loss and the gradient of a step are finite, and returns whether those of all models are."""
Forward: TypeAlias = Callable[[SequenceSample, MicroBatchSpec, PostHook], SequenceSample]
"""The type of `PipelinableEngine.forward`."""


@runtime_checkable
class Scores(Protocol):
    """Computes the outputs of given texts: every engine, and a sampler that can run its copy of the model."""

    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        """See `PipelinableEngine.forward`."""
        ...


@runtime_checkable
class StepsInHalves(Protocol):
    """An engine whose training step has two halves: a gradient, and a step with it.

    Workers of runtime=ray get only their part of a batch then, and the driver decides between the halves. Workers with
    another engine get the whole batch, for `PipelinableEngine.train_batch`.
    """

    def accumulate(self, part: SequenceSample, mb_spec: MicroBatchSpec, loss_fn: LossFn, weight: Tensor) -> Stats:
        """Run the first half: the gradient of the sum of `loss_fn`, divided by `weight`, which changes no weight.

        Args:
            part: the prompts of this process, see `PipelinableEngine.data_rank`.
            mb_spec: token budget of a micro-batch.
            loss_fn: see `PipelinableEngine.train_batch`.
            weight: weight of the whole batch, above 0; 0-d.

        Returns:
            The metrics of `part` alone, to be merged with those of the other parts.
        """
        ...

    def finite(self) -> bool:
        """Return whether the loss and the gradient from `accumulate` are finite."""
        ...

    def apply(self, weight: Tensor, *, vetoed: bool = False) -> Stats:
        """Run the second half: the optimizer step, or a skipped one if `vetoed`. Return metrics of the whole batch."""
        ...

    def skip(self, reason: str) -> Stats:
        """Count a step that was skipped before its first half, such as `zero_weight_steps`."""
        ...


@dataclass(frozen=True)
class EngineCapabilities:
    """What an engine can do beyond the core of `PipelinableEngine`, and what is known about its model."""

    outputs: frozenset[str]
    """Outputs of its `ModelOutput`: "logprobs" of a language model, which `generate` samples; "values" and "scores" of
    a scalar head; "q_values" of Q heads."""
    trainable: bool
    """Whether callers may call `train_batch`."""
    positions: int | None = None
    """Context window in tokens; None if it is unlimited or unknown."""
    eos_token_ids: tuple[int, ...] = ()
    """End tokens of the model, at which `generate` stops unless the request names others; empty if unknown."""
    live_head: bool = False
    """Whether the result of `lm_head` follows later changes of the weights; otherwise it is a copy."""
    images: bool = False
    """Whether the network reads the images of prompts (`realign.api.sample`)."""
    encoder_decoder: bool = False
    """Whether an encoder reads the prompt, so that the network predicts only tokens of one response."""
    router_replay: bool = False
    """Whether `generate` can record the choices of experts, and forward passes replay them. The choices are the key
    `router_experts`, see `GenerationConfig.router_replay`."""
    router_replay_obstacle: str = "the engine does not support it."
    """Why not, for the error message."""
    sampling_replay: bool = False
    """Whether `generate` can record sampling masks, and forward passes normalize over them. The masks are the key
    `sampling_mask`, see `GenerationConfig.sampling_replay`."""
    products: int = 0
    """Number of weights that each token is multiplied by, so without input embeddings; 0 if unknown, or if tokens use
    different ones (experts)."""
    size: str = ""
    """Size and device of the model for the display, such as `135M parameters on cuda:0`; empty if unknown."""


class PipelinableEngine(ABC):
    """Runs one network: cuts batches, packs them, moves them to devices and shards them. Contains no algorithm.

    To write an engine, implement the abstract methods. The others have defaults for an engine in one process without
    schedules, and raise an error for what only some engines can do. `realign.testing.check_engine` checks an engine
    against this contract.
    """

    @abstractmethod
    def capabilities(self) -> EngineCapabilities:
        """Return what this engine can do, which never changes."""

    @abstractmethod
    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        """Run without gradients, and return the keys that `post_hook` added, in the order of `data`."""

    @abstractmethod
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

        Raises:
            ValueError: the engine is not trainable.
        """

    @abstractmethod
    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """Sample `config.n` responses for each prompt of key `prompt_ids`, one call at a time.

        `Model.sampler` calls this; interfaces call `Model.sampler`. The random numbers of a response depend only on
        (seed, id, response index).

        Returns:
            A sample of the same ids: `input_ids`, `prompt_mask`, `loss_mask`, `logprobs` [T], `truncated` [S] bool
            and `response_index` [S]; with `config.router_replay` also `router_experts`, with `config.sampling_replay`
            also `sampling_mask`.

        Raises:
            ValueError: the network is no language model.
        """

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Return all weights of the network by name, unsharded and without duplicates.

        The names of a value head's weights start with "value_head.". The tensors may be views, which training
        changes.
        """

    @abstractmethod
    def load_weights(self, weights: Mapping[str, Tensor], mix: float = 1.0) -> None:
        """Set each weight to (1 - mix) * old + mix * new. The default of 1 copies bitwise.

        Raises:
            ValueError: names or shapes differ from those of `weights()`, or `mix` is not in (0, 1].
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state that training changes (weights, optimizer moments, counts) as plain values and tensors."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any], *, weights_only: bool = False) -> None:
        """Restore what `state_dict` returned. With `weights_only`, leave the optimizer unchanged."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write a Hugging Face folder: safetensors, config and tokenizer."""

    def start_step(self, version: int) -> None:  # noqa: B027 (an engine without schedules ignores it)
        """Set the number of completed training steps (rollout batches), which schedules counted in them follow."""

    def updates_begun(self) -> int | None:
        """Return how often `train_batch` has begun to change the weights; None if the engine doesn't count it.

        After an error in `train_batch`, an unchanged count says that the weights are those of the step before, so that
        they can be saved.
        """
        return None

    def agree_on_steps(self, agree: Agree | None) -> None:
        """Call `agree` before each later optimizer step, and skip the step if it returns False; None: ask nobody.

        Raises:
            ValueError: the engine cannot wait between the gradient and the step.
        """
        if agree is not None:
            name = type(self).__name__
            raise ValueError(f"{name} cannot wait for other models before a step. Set skip_together=false.")

    @property
    def data_ranks(self) -> int:
        """Number of parts into which the engine's processes cut a batch; 1 if each of them computes all of it."""
        return 1

    @property
    def data_rank(self) -> int:
        """Index of the part of a batch that this process computes, from 0."""
        return 0

    def forward_part(self, part: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        """Run `forward` on the prompts of this process. All processes call it, also with an empty part."""
        return self.forward(part, mb_spec, post_hook)

    def reference_part(self, layers: int | None = None) -> Forward:
        """Return a `reference` for the prompts of this process; see `forward_part`."""
        return self.reference(layers)

    def generate_part(self, part: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """Run `generate` for the prompts of this process; see `forward_part`."""
        return self.generate(part, config, seed=seed)

    def resident(self) -> Iterable[Tensor]:
        """Return the tensors that stay on the device between calls, which the caller may move away and back.

        Raises:
            ValueError: the engine does not list them.
        """
        raise ValueError(f"{type(self).__name__} does not list the tensors that stay on its device")

    def reduce(self, x: Tensor) -> Tensor:
        """Sum over data-parallel ranks. With one process, return `x`."""
        return x

    def fixed_weights(self) -> dict[str, Any]:
        """Return the weights that training does not change, which `state_dict` omits; empty if all weights train."""
        return {}

    def measure(self, data: SequenceSample, mb_spec: MicroBatchSpec, loss_fn: LossFn) -> Stats:
        """Return the metrics of `loss_fn` on `data`, and its sum as metric `LOSS_SUM`, without gradients."""
        return run_loss(self.forward, data, mb_spec, loss_fn)

    def reference(self, layers: int | None = None) -> Forward:
        """Return a `forward` that always uses the current weights, unaffected by later training.

        Args:
            layers: number of top layers to copy; None copies all layers that are trained.

        Raises:
            ValueError: the engine cannot keep its initial weights in addition to the trained ones.
        """
        raise ValueError(f"{type(self).__name__} has no reference branch")

    def lm_head(self) -> LMHead:
        """Return the language-model head, detached, for losses of other roles over the whole vocabulary.

        It is a copy, or shares the memory of the weights (`EngineCapabilities.live_head`).
        """
        return copy_head(self.forward)

    def use_heads(self, heads: Mapping[str, LMHead]) -> None:
        """Set or replace the heads of these roles, for `ModelOutput.divergence`.

        Raises:
            ValueError: the engine has no losses over the whole vocabulary.
        """
        raise ValueError(f"{type(self).__name__} has no losses over the whole vocabulary")


HIDDEN = "_hidden"
"""Suffix of keys with hidden states: `teacher_hidden` contains those of role `teacher`, whose head maps them to logits.
"""


def role_of_hidden(key: str) -> str | None:
    """Return the role whose head maps the hidden states of this key to logits; None for other keys."""
    return key.removesuffix(HIDDEN) if key.endswith(HIDDEN) else None


def copy_head(forward: Forward) -> LMHead:
    """Return a copy of the language-model head of an engine, which `forward` may run in other processes."""
    one_token = SequenceSample(("head",), {TOKENS: torch.zeros(1, dtype=torch.int64)}, {TOKENS: Lengths.of([[1]])})
    keys = forward(one_token, MicroBatchSpec(), _with_head)
    scale, softcap = keys["numbers"].tolist()
    return LMHead(keys["weight"], keys.get("bias"), scale, softcap or None)


def _with_head(output: ModelOutput, mb: SequenceSample) -> SequenceSample:
    """Add the weights of the head as keys, which travel between processes as any other key does."""
    head = output.lm_head
    words = Lengths.of([[len(head.weight_VH)]])
    added = mb.with_data({"weight": head.weight_VH.detach().clone()}, lengths=words)
    if head.bias_V is not None:
        added = added.with_data({"bias": head.bias_V.detach().clone()}, lengths=words)
    # A tensor has no None: 0 means no soft cap.
    numbers = torch.tensor([head.scale, head.softcap or 0.0], dtype=torch.float64)
    return added.with_data({"numbers": numbers.to(mb[TOKENS].device)}, lengths=Lengths.of([[2]]))


LOSS_SUM = "sum of the loss"
"""The metric that `PipelinableEngine.measure` adds to those of the loss function."""


def run_loss(forward: Forward, data: SequenceSample, mb_spec: MicroBatchSpec, loss_fn: LossFn) -> Stats:
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

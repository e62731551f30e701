"""`TransformersEngine`: runs and trains one transformers model on packed sequences, in one process.

The engine splits a batch into micro-batches by a token budget. Results do not depend on the split. A loss function
returns sums, and the accumulated gradient is divided once, by the weight of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realign.api.microbatch import MicroBatchSpec
from realign.api.model import (
    Forward,
    GenerationConfig,
    LossFn,
    LossWeightFn,
    PipelinableEngine,
    PostHook,
    StepIf,
    derive_seed,
)
from realign.api.sample import TOKENS, SequenceSample
from realign.api.stats import Stats, merge_stats
from realign.api.trace import keep_traces, with_responses
from realign.engines.files.folders import AVERAGED, save_folder
from realign.engines.files.weights import check_weights, mix_into, named_weights, shapes_of
from realign.engines.network.cpu_lanes import ParallelPasses, side_by_side
from realign.engines.network.heads import read_head
from realign.engines.network.kernels import Backend
from realign.engines.network.network import Network, Run, check_finite
from realign.engines.network.output import ScalarHead
from realign.engines.network.shared_prefix import Layout, Passes, SharedPrompts
from realign.engines.network.trains import All, Trained
from realign.engines.network.value_head import ValueNetwork
from realign.engines.sampling.trunk import positions_of
from realign.engines.sampling.weight_fusion import Fusion
from realign.engines.training.ema import WeightAverage
from realign.engines.training.nonfinite import origin
from realign.engines.training.optimizer import OptimizerSpec
from realign.engines.training.stepper import Stepper, counted, single, step_weight
from realign.functional.logprobs import LMHead

PARTS = {"value_head": "a value head", "optimizer": "an optimizer", "ema": "averaged weights"}
"""Optional parts of an engine's state, and their names in messages."""


@dataclass(frozen=True, eq=False)
class Accumulated:
    """Inputs of the accumulated gradient, kept to locate the source of a non-finite value."""

    passes: Passes
    losses: Sequence[Tensor]
    """Loss of each micro-batch, 0-d."""
    loss_fn: LossFn


class TransformersEngine(PipelinableEngine):
    """Single-process engine. Implements `realign.api.PipelinableEngine`.

    The weights are fp32. Between calls the model is in eval mode.
    """

    def __init__(
        self,
        name: str,
        module: Any,
        tokenizer: Any,
        *,
        seed: int,
        optimizer: OptimizerSpec | None = None,
        dtype: torch.dtype = torch.float32,
        attention: Backend = Backend.auto,
        gradient_checkpointing: bool = False,
        dropout: bool = False,
        value_head: ValueNetwork | None = None,
        trains: Trained | None = None,
        vocabulary: int | None = None,
        shared_prompts: SharedPrompts = SharedPrompts.auto,
        fused_rollout: bool = True,
        parallel_passes: ParallelPasses = ParallelPasses.auto,
        max_slots: int | None = None,
    ) -> None:
        """Wrap and probe a transformers model that was loaded in fp32 with `attn_implementation=ATTENTION`.

        Args:
            name: role of the model, used in messages and seeds.
            module: the model, on its device.
            tokenizer: saved with the model; its end token ends responses.
            seed: root seed of the run.
            optimizer: trains the parameters that require a gradient; None freezes the model.
            dtype: dtype of matrix products; bfloat16 uses autocast.
            attention: kernel of packed attention.
            gradient_checkpointing: recompute layers in the backward pass.
            dropout: apply the model's dropout in `train_batch`.
            value_head: value network of this model, on its device.
            trains: the weights for which `module` was prepared, see `Trained.prepare`; None means all weights.
            vocabulary: number of tokens that can be sampled, counted from id 0; None means all tokens.
            shared_prompts: whether to compute the prompt of a group once.
            fused_rollout: run rollouts with fewer operators if the model family supports it.
            parallel_passes: whether to compute micro-batches concurrently on a CPU.
            max_slots: sequences that a rollout decodes concurrently; None uses as many as fit 1 GiB of KV cache.

        Raises:
            ConfigError: the model family cannot run packed.
        """
        self.name = name
        self._trains = trains or All()
        self.network = self._network(
            name,
            module,
            dtype=dtype,
            attention=attention,
            dropout=dropout,
            value_head=value_head,
            trains=self._trains,
            vocabulary=vocabulary,
            shared_prompts=shared_prompts,
            fused_rollout=fused_rollout,
            parallel_passes=parallel_passes,
        )
        if optimizer is None:
            self.network.requires_grad_(False)
        self.module = module
        self.value_head = value_head
        self.device = self.network.device
        self.tokenizer = tokenizer
        self.max_slots = max_slots
        self._seed = seed
        self._dropout = dropout
        self._checkpointed = _enable_checkpointing(module, dropout) if gradient_checkpointing else []
        self._stepper = self._make_stepper(name, optimizer) if optimizer else None
        decay = optimizer.ema_decay if optimizer else None
        self._average = None if decay is None else WeightAverage(self.network.owned(), decay)
        self._accumulated: Accumulated | None = None

    def _network(self, name: str, module: Any, **settings: Any) -> Network:
        return Network(name, module, **settings)

    def _make_stepper(self, name: str, spec: OptimizerSpec) -> Stepper:
        return Stepper(name, spec, self.network.owned())

    @property
    def head(self) -> LMHead | ScalarHead:
        """Last layer of the model."""
        return self.network.head

    @property
    def trainable(self) -> bool:
        """Whether an optimizer was configured."""
        return self._stepper is not None

    @property
    def outputs(self) -> frozenset[str]:
        """See `PipelinableEngine.outputs`."""
        language = {"logprobs"} if isinstance(self.head, LMHead) else set()
        scalar = {"values", "scores"} if self.value_head is not None or not language else set()
        return frozenset(language | scalar)

    @property
    def positions(self) -> int | None:
        """See `positions_of`."""
        return positions_of(self.module)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End tokens of the tokenizer and of the model's `generation_config`, whose other settings are ignored."""
        found: set[int] = set()
        for source in (self.tokenizer, getattr(self.module, "generation_config", None)):
            ids = getattr(source, "eos_token_id", None)
            found.update([] if ids is None else [ids] if isinstance(ids, int) else ids)
        return tuple(sorted(found))

    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        """See `PipelinableEngine.forward`. Dropout is never applied here.

        Raises:
            ValueError: the hook added no key, or added one with a different number of sequences.
        """
        return self._forward(data, mb_spec, post_hook, self.network.run, parallel=True)

    def reference(self, layers: int | None = None) -> Forward:
        """Return a `forward` that uses the current policy, regardless of later training; see `Network.reference`."""
        return partial(self._forward, run=self.network.reference(layers))

    def _forward(
        self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook, run: Run, *, parallel: bool = False
    ) -> SequenceSample:
        passes = self.network.passes(data, mb_spec, parallel=parallel)

        @torch.no_grad()
        def compute(micro_batch: tuple[SequenceSample, Layout]) -> SequenceSample:
            part, layout = micro_batch
            moved = part.to(self.device)
            return added(post_hook(run(part, moved, layout), moved), moved)

        return self._restored_to(data[TOKENS].device, passes, list(side_by_side(compute, passes, passes.lanes)))

    def _restored_to(self, device: torch.device, passes: Passes, results: Sequence[SequenceSample]) -> SequenceSample:
        """Merge the results of all passes into one sample on `device`, and wait for the copies."""
        whole = passes.batches.restore(results).to(device)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # `SequenceSample.to` does not wait for its copies
        return whole

    def train_batch(
        self,
        data: SequenceSample,
        mb_spec: MicroBatchSpec,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        step_if: StepIf | None = None,
    ) -> Stats:
        """See `PipelinableEngine.train_batch`.

        Metrics of the engine are `loss`, `grad_norm` (before clipping), `lr`, `tokens`, `shared_tokens`, and
        `n_microbatches`. `shared_tokens` counts the tokens that prompt sharing did not recompute. Step counts are
        `optimizer_steps` (taken) and `skipped_steps`. Skipped steps are also counted by reason: `zero_weight_steps`,
        `zero_gradient_steps`, `nonfinite_steps` and `vetoed_steps`.

        Raises:
            ValueError: the model is frozen, the loss is not an fp32 scalar, or the weight is negative or not finite.
            RunError: `max_nonfinite_in_a_row` consecutive steps had a non-finite loss or gradient.
        """
        weight = step_weight(data, loss_weight_fn).to(self.device)
        if float(weight) == 0:
            return self.skip("zero_weight_steps")
        stats = self.accumulate(data, mb_spec, loss_fn, weight)
        return {**stats, **self.apply(weight, vetoed=step_if is not None and not step_if(stats))}

    def accumulate(self, part: SequenceSample, mb_spec: MicroBatchSpec, loss_fn: LossFn, weight: Tensor) -> Stats:
        """Reset the gradient, then accumulate the gradient of the sum of `loss_fn` over `part`, divided by `weight`.

        Args:
            part: a batch, or the prompts of one data-parallel rank.
            mb_spec: token budget of a micro-batch.
            loss_fn: see `PipelinableEngine.train_batch`.
            weight: weight of the whole batch, above 0; 0-d.

        Returns:
            The metrics of `loss_fn`, and `tokens`, `shared_tokens` and `n_microbatches`. They cover this part only;
            merge them with `merge_stats`.

        Raises:
            ValueError: the model is frozen, or the loss is not an fp32 scalar.
        """
        stepper = self._trained()
        stepper.zero_grad()
        weight = weight.to(self.device)
        passes = self.network.passes(with_responses(part, mb_spec), mb_spec, parallel=True, training=True)

        def compute(micro_batch: tuple[SequenceSample, Layout]) -> tuple[Tensor, Any, list[Tensor | None]]:
            here, layout = micro_batch
            moved = here.to(self.device)
            loss, stats = loss_fn(self.network.run(here, moved, layout, training=True), moved)
            check_loss(loss)
            gradients: list[Tensor | None] = []
            if loss.requires_grad and passes.lanes > 1:
                gradients = stepper.differentiate(loss / weight)
            elif loss.requires_grad:
                (loss / weight).backward()
            return loss.detach().float(), keep_traces(stats, moved, mb_spec), gradients

        losses: list[Tensor] = []
        metrics: list[Any] = []  # also accepts plain (sum, count) pairs
        with self._training():
            for loss, stats, gradients in side_by_side(compute, passes, passes.lanes):
                if gradients:  # in micro-batch order, whichever finished first
                    stepper.accumulate(gradients)
                losses.append(loss)
                metrics.append(stats)
        self._accumulated = Accumulated(passes, losses, loss_fn)
        return merge_stats(metrics) | self._counts(part, passes)

    def _counts(self, part: SequenceSample, passes: Passes) -> Stats:
        return {
            "tokens": counted(part.lengths[TOKENS].total, self.device),
            "shared_tokens": counted(passes.saved, self.device),
            "n_microbatches": single(len(passes.batches), self.device),
        }

    def apply(self, weight: Tensor, *, vetoed: bool = False) -> Stats:
        """Run the optimizer step with the gradient from `accumulate`.

        Args:
            weight: the same weight as in `accumulate`.
            vetoed: skip the step, and count it as vetoed.

        Returns:
            `loss`, `grad_norm`, `lr` and the step counts, for the whole batch.

        Raises:
            ValueError: nothing was accumulated since the last step.
            RunError: see `train_batch`.
        """
        stepper, done = self._trained(), self._accumulated
        if done is None:
            raise ValueError(f"model {self.name!r}: apply has no gradient. Call accumulate first.")
        self._accumulated = None
        weight, steps = weight.to(self.device), stepper.optimizer_steps
        culprits = partial(self._nonfinite_origin, done, weight)
        stats = stepper.step(self._total_loss(done.losses), weight, vetoed=vetoed, culprits=culprits)
        if self._average is not None and stepper.optimizer_steps > steps:
            self._average.update()
        return stats

    def skip(self, reason: str) -> Stats:
        """Count a skipped step for one of `stepper.REASONS`; `zero_weight_steps` is a batch of weight 0."""
        return self._trained().report(self.device, skipped=reason)

    def _total_loss(self, losses: Sequence[Tensor]) -> Tensor:
        """Return the sum over the batch of the losses that `loss_fn` returned."""
        return torch.stack([torch.zeros((), device=self.device), *losses]).sum()

    def _nonfinite_origin(self, done: Accumulated, weight: Tensor) -> str:
        """Describe the source of a non-finite loss or gradient, and leave no gradient behind."""
        stepper = self._trained()
        if (broken := self.network.nonfinite_weight()) is not None:
            return f"the model: weight {broken!r} is not finite"

        def is_finite(part: SequenceSample, layout: Layout | None) -> bool:
            layout = layout or next(iter(self.network.passes(part, MicroBatchSpec(), training=True)))[1]
            moved = part.to(self.device)
            loss, _ = done.loss_fn(self.network.run(part, moved, layout, training=True), moved)
            if loss.requires_grad:
                (loss / weight).backward()
            finite = bool(loss.isfinite()) and bool(stepper.gradient_norm().isfinite())
            stepper.zero_grad()
            return finite

        with self._training():
            return origin(list(done.passes), done.losses, is_finite)

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """See `PipelinableEngine.generate`.

        Raises:
            ValueError: the model has a scalar head.
            RealignError: see `rollout.generate`.
        """
        from realign.engines.sampling.rollout import generate

        module, fusion = self._sampler()
        if not isinstance(head := read_head(module), LMHead):
            raise ValueError(f"models.{self.name}: a model with a scalar head cannot generate. Set head=causal.")
        with torch.no_grad(), self.network.autocast():
            return generate(
                module,
                self.network.limited(head),
                data,
                config,
                seed=seed,
                eos_token_ids=self.eos_token_ids,
                tokenizer=self.tokenizer,
                fusion=fusion,
                max_slots=self.max_slots,
            )

    def _sampler(self) -> tuple[Any, Fusion | None]:
        """Return the model that rollouts run, and its `Fusion`, if any."""
        return self.module, self.network.fusion

    def reduce(self, x: Tensor) -> Tensor:
        """Return the sum over data-parallel ranks; in one process this is `x`."""
        return x

    def start_step(self, version: int) -> None:
        """See `PipelinableEngine.start_step`."""
        if self._stepper is not None:
            self._stepper.train_steps = version

    def save(self, path: Path) -> None:
        """See `PipelinableEngine.save`. The folder is created or replaced atomically, when it is complete.

        If the engine keeps averaged weights, it also saves them, in a folder with the suffix `_ema`.

        Raises:
            RunError: a weight is not finite.
            ConfigError: `path` is a symbolic link.
            OSError: the folder cannot be written.
        """
        check_finite(self.name, self.module, self.value_head)
        path = Path(path)
        save_folder(path, self._write)
        if self._average is not None:
            with self._average.in_place():
                save_folder(path.with_name(f"{path.name}{AVERAGED}"), self._write)

    def _write(self, folder: Path) -> None:
        self.network.save(folder)
        self.tokenizer.save_pretrained(folder)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that training changes: weights, optimizer moments and step counts.

        `load_state_dict` resumes from this state without any difference from an uninterrupted run.
        """
        state = {name: None if part is None else part.state_dict() for name, part in self._parts().items()}
        module = self.network.module_state(fixed=False)
        return {"module": module, **state, "fused": self.network.fusion is not None and self.network.fusion.known}

    def fixed_weights(self) -> dict[str, Any]:
        """See `PipelinableEngine.fixed_weights`."""
        head = self.value_head.state_dict() if self.value_head is not None and not self.trainable else {}
        return {"module": self.network.module_state(fixed=True), "value_head": head}

    def load_state_dict(self, state: Mapping[str, Any], *, weights_only: bool = False) -> None:
        """Restore the state that `state_dict` returned.

        Args:
            state: state of an engine over the same model.
            weights_only: keep the current optimizer moments and step counts, and restart the average from the loaded
                weights.

        Raises:
            ValueError: only one of state and engine has an optimizer, a value head or averaged weights; or a
                different set of weights is trained.
        """
        if state.get("fused") and self.network.fusion is not None:
            self.network.fusion.compare()
        parts = self._parts()
        if weights_only:
            parts = {"value_head": parts["value_head"]}
        for name, part in parts.items():
            if (state[name] is None) != (part is None):
                lacks, has = ("saved state", "engine") if part is not None else ("engine", "saved state")
                raise ValueError(f"models.{self.name}: the {has} has {PARTS[name]}, but the {lacks} does not")
        self.network.load_module_state(state["module"])
        for name, part in parts.items():
            if part is not None:
                part.load_state_dict(state[name])
        if weights_only and self._average is not None:
            self._average.restart()

    def weights(self) -> dict[str, Tensor]:
        """See `PipelinableEngine.weights`. A model with adapters returns both adapter and base weights."""
        return named_weights(self.module, self.value_head)

    def load_weights(self, weights: Mapping[str, Tensor], mix: float = 1.0) -> None:
        """See `PipelinableEngine.load_weights`. Optimizer moments and averages do not change."""
        own = self.weights()
        check_weights(self.name, shapes_of(own), shapes_of(weights), mix)
        mix_into(own, weights, mix)

    def resident(self) -> Iterator[Tensor]:
        """Iterate over tensors kept on the device between calls: weights, buffers, moments and averages."""
        yield from self.network.parameters()
        yield from self.network.buffers()
        if self._stepper is not None:
            yield from self._stepper.moments()
        if self._average is not None:
            yield from self._average.average

    def _parts(self) -> dict[str, Any]:
        return {"value_head": self.value_head, "optimizer": self._stepper, "ema": self._average}

    def _trained(self) -> Stepper:
        if self._stepper is None:
            raise ValueError(f"models.{self.name}: a model without an optimizer cannot train. Set optimizer.lr.")
        return self._stepper

    def dropout_seed(self) -> int:
        """Return the seed of the dropout masks in the next `accumulate`."""
        return derive_seed(self._seed, self.name, "dropout", self._trained().optimizer_steps)

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Set module modes and random state for a training pass, and restore them on exit.

        Checkpointed layers recompute only in train mode. Without dropout all other modules stay in eval mode, so that
        `train_batch` and `forward` compute the same. The dropout of adapters has a separate rate.
        """
        with ExitStack() as stack:
            stack.callback(self.network.eval)
            adapter_dropouts = self._trains.dropouts(self.network)
            if self._dropout or adapter_dropouts:
                stack.enter_context(torch.random.fork_rng())
                torch.manual_seed(self.dropout_seed())
            if self._dropout:
                self.network.train()
            for dropout in adapter_dropouts:
                dropout.train()
            for layer in self._checkpointed:
                layer.training = True
            yield


def _enable_checkpointing(module: Any, dropout: bool) -> list[Any]:
    """Enable gradient checkpointing, and return the modules that check their own `training` flag for it."""
    # transformers is renaming this method: use the new name if it exists
    enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
    enable()
    checkpointed = [m for m in module.modules() if getattr(m, "gradient_checkpointing", False)]
    for layer in [] if dropout else checkpointed:
        for name, x in vars(layer).items():  # OPT layers store their rates as plain floats
            if isinstance(x, float) and ("dropout" in name or name == "layerdrop"):
                setattr(layer, name, 0.0)
    return checkpointed


def added(result: SequenceSample, micro_batch: SequenceSample) -> SequenceSample:
    """Return the keys of `result` that the micro-batch does not contain."""
    new = [k for k, x in result.data.items() if x is not micro_batch.data.get(k)]
    if not new:
        raise ValueError(
            f"post_hook returned only keys of the micro-batch ({', '.join(sorted(result.data))}). It must add a key."
        )
    return result.select(new)


def check_loss(loss: Tensor) -> None:
    """Raise ValueError unless `loss`, returned by a `loss_fn`, is a 0-d floating-point sum."""
    if loss.ndim or loss.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"loss_fn returned {loss.dtype} {list(loss.shape)}. It must return a 0-d float32 sum.")

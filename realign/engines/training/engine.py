"""`TransformersEngine`: runs and trains one transformers model on packed sequences, in one process.

The engine splits a batch into micro-batches by a token budget. Results do not depend on the split. A loss function
returns sums, and the accumulated gradient is divided once, by the weight of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realign.api.engine import LossFn, LossWeightFn, StepIf
from realign.api.microbatch import MicroBatchSpec
from realign.api.sample import TOKENS, SequenceSample
from realign.api.seeds import derive_seed
from realign.api.stats import Stats, merge_stats
from realign.api.trace import keep_traces, with_responses
from realign.engines.files.folders import AVERAGED, save_folder
from realign.engines.files.image_processor import copy_image_processor
from realign.engines.files.tokenizers import save_tokenizer
from realign.engines.network.cpu_lanes import ParallelPasses, side_by_side
from realign.engines.network.kernels import Backend
from realign.engines.network.lora import save_adapters, save_base
from realign.engines.network.network import Network, check_finite, write_network
from realign.engines.network.q_heads import TargetUpdate
from realign.engines.network.shared_prefix import Layout, Passes, SharedPrompts
from realign.engines.network.torch_compile import TorchCompile
from realign.engines.network.trains import All, Trained
from realign.engines.network.value_head import ValueNetwork
from realign.engines.sampling.compiled_library import CompiledDecode
from realign.engines.sampling.slots import CACHE_FRACTION
from realign.engines.training.callbacks import check_loss
from realign.engines.training.ema import WeightAverage
from realign.engines.training.expert_load import LoadBalancer, StepLoad, counting, listening
from realign.engines.training.inference import InferenceEngine
from realign.engines.training.load_balancing import LoadBalancing
from realign.engines.training.modes import TrainingModes
from realign.engines.training.nonfinite import Accumulated, origin_in
from realign.engines.training.optimizer import OptimizerSpec
from realign.engines.training.state import EngineState
from realign.engines.training.stepper import Stepper, counted, single, step_weight


class TransformersEngine(InferenceEngine):
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
        compiled_decode: CompiledDecode = CompiledDecode.auto,
        parallel_passes: ParallelPasses = ParallelPasses.auto,
        max_slots: int | None = None,
        cache_fraction: float = CACHE_FRACTION,
        sync_every: int | None = None,
        keep_memory: bool = False,
        cuda_graphs: bool = False,
        load_balancing: LoadBalancing | None = None,
        torch_compile: TorchCompile = TorchCompile.off,
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
            compiled_decode: whether decode steps of such a rollout run in a compiled library.
            parallel_passes: whether to compute micro-batches concurrently on a CPU.
            max_slots: sequences that a rollout decodes concurrently; None uses as many as fit `slots.cache_bytes`.
            cache_fraction: fraction of the free memory of a GPU for the KV cache, if `max_slots` is None.
            sync_every: decode steps between two host synchronizations, see `slots.Rollout`.
            keep_memory: keep the memory of weights and KV cache between rollouts.
            cuda_graphs: capture decode steps as CUDA graphs.
            load_balancing: balances the experts in training; None if not.
            torch_compile: backend that compiles the decoder layers for training and scoring.

        Raises:
            ConfigError: the model family is not supported.
        """
        self._balancer = LoadBalancer(name, module, load_balancing)  # before a sharded network divides the routers
        network = self._network(
            name,
            module,
            dtype=dtype,
            attention=attention,
            dropout=dropout,
            value_head=value_head,
            trains=trains or All(),
            vocabulary=vocabulary,
            shared_prompts=shared_prompts,
            fused_rollout=fused_rollout,
            compiled_decode=compiled_decode,
            # routers cannot tell concurrent passes apart, and compilation is not safe in several threads
            parallel_passes=ParallelPasses.off if load_balancing or torch_compile.compiles else parallel_passes,
            torch_compile=torch_compile,
        )
        super().__init__(
            name,
            network,
            tokenizer,
            seed=seed,
            max_slots=max_slots,
            cache_fraction=cache_fraction,
            sync_every=sync_every,
            keep_memory=keep_memory,
            cuda_graphs=cuda_graphs,
        )
        self._balancer.check(network.unpacked)
        if optimizer is None:
            network.requires_grad_(False)
        self._modes = TrainingModes(network, dropout=dropout, gradient_checkpointing=gradient_checkpointing)
        self._stepper = self._make_stepper(optimizer) if optimizer else None
        decay = optimizer.ema_decay if optimizer else None
        self._average = None if decay is None else WeightAverage(network.owned(), decay)
        self._targets = self._target_update()
        self._state = EngineState(name, network, self._stepper, self._average)
        self._accumulated: Accumulated | None = None
        self._load: StepLoad | None = None

    def _network(self, name: str, module: Any, **settings: Any) -> Network:
        return Network(name, module, **settings)

    def _make_stepper(self, spec: OptimizerSpec) -> Stepper:
        return Stepper(self.name, spec, self.network.owned(), self.network.outer_ids())

    def _target_update(self) -> TargetUpdate | None:
        """Return the update of target Q heads after optimizer steps; None without Q heads."""
        if self.value_head is None or self.value_head.spec.q_heads is None:
            return None
        names = [name for name, _ in self.network.named_parameters()]
        return TargetUpdate(names, self.network.owned(), self.value_head.spec.q_heads.target_rate)

    def describe(self) -> str:
        """Return the number of parameters, without those of a value head, the device, and whether it runs unpacked."""
        size = _magnitude(sum(p.numel() for p in self.network.module.parameters()))
        return f"{size} parameters on {self.device}" + (", unpacked" if self.network.unpacked is not None else "")

    @property
    def trainable(self) -> bool:
        """Whether an optimizer was configured."""
        return self._stepper is not None

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
        `n_microbatches`. `shared_tokens` counts the tokens that prompt sharing did not recompute. `load_balancing`
        adds its loss to the gradient, but not to `loss`, and adds the metrics of `StepLoad`. A batch with the key
        `router_experts` adds the metrics of `RouterReplay`. Step counts are `optimizer_steps` (taken) and
        `skipped_steps`. Skipped steps are also counted by reason: `zero_weight_steps`, `zero_gradient_steps`,
        `nonfinite_steps` and `vetoed_steps`.

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
        load = self._start_load(passes, range(0))

        def compute(micro_batch: tuple[SequenceSample, Layout]) -> tuple[Tensor, Any, list[Tensor | None]]:
            here, layout = micro_batch
            moved = here.to(self.device)
            with counting(load, layout):
                output = self.network.run(here, moved, layout, training=True)
            loss, stats = loss_fn(output, moved)
            check_loss(loss)
            gradients: list[Tensor | None] = []
            if load is not None:
                differentiate_with_hidden(output.hidden_RH, loss / weight)
            elif loss.requires_grad and passes.lanes > 1:
                gradients = stepper.differentiate(loss / weight)
            elif loss.requires_grad:
                (loss / weight).backward()
            return loss.detach().float(), keep_traces(stats, moved, mb_spec), gradients

        losses: list[Tensor] = []
        metrics: list[Any] = []  # also accepts plain (sum, count) pairs
        with self._training(), listening(load):
            for loss, stats, gradients in side_by_side(compute, passes, passes.lanes):
                if gradients:  # in micro-batch order, whichever finished first
                    stepper.accumulate(gradients)
                losses.append(loss)
                metrics.append(stats)
        self._accumulated = Accumulated(passes, losses, loss_fn)
        return merge_stats(metrics) | self._counts(part, passes) | self._load_metrics(load) | self._replay_metrics()

    def _start_load(self, passes: Passes, idle: range) -> StepLoad | None:
        """Start to balance the experts in a step; `idle` are passes that only other ranks need."""
        return self._balancer.start(len(passes.batches), lambda load: self._count_load(load, passes), self._sum_ranks)

    @torch.no_grad()
    def _count_load(self, load: StepLoad, passes: Passes) -> None:
        for here, layout in passes:
            with counting(load, layout):
                self.network.run(here, here.to(self.device), layout)

    def _load_metrics(self, load: StepLoad | None) -> Stats:
        self._load = load
        return {} if load is None else load.metrics(self._sum_ranks)

    def _replay_metrics(self) -> Stats:
        return {} if self.network.replay is None else self.network.replay.take_stats()

    def _sum_ranks(self, x: Tensor) -> Tensor:
        return x

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
        if stepper.optimizer_steps > steps:
            if self._average is not None:
                self._average.update()
            if self._targets is not None:
                self._targets.update()
            if self._load is not None:
                self._balancer.finish(self._load)
        return stats

    def skip(self, reason: str) -> Stats:
        """Count a skipped step for one of `stepper.REASONS`; `zero_weight_steps` is a batch of weight 0."""
        return self._trained().report(self.device, skipped=reason)

    def _total_loss(self, losses: Sequence[Tensor]) -> Tensor:
        """Return the sum over the batch of the losses that `loss_fn` returned."""
        return torch.stack([torch.zeros((), device=self.device), *losses]).sum()

    def _nonfinite_origin(self, done: Accumulated, weight: Tensor) -> str:
        """Describe the source of a non-finite loss or gradient, and leave no gradient behind."""
        with self._training():
            return origin_in(done, self.network, self._trained(), weight)

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
        self._save(path)
        if self._average is not None:
            with self._average.in_place():
                self._save(path.with_name(f"{path.name}{AVERAGED}"))

    def _save(self, path: Path) -> None:
        self._save_as(path, self.network.trains.save, with_value_head=True)

    @property
    def adapter_rank(self) -> int | None:
        """Rank of the LoRA adapters; None if the model has none."""
        return self.network.trains.adapter_rank

    def save_adapter(self, path: Path) -> None:
        """Write the LoRA adapters alone, as a folder of peft; see `save` for the errors."""
        check_finite(self.name, self.module, self.value_head)
        self._save_as(path, save_adapters, with_value_head=False)

    def save_base(self, path: Path) -> None:
        """Write the model without its LoRA adapters; see `save` for the errors."""
        self._save_as(path, save_base, with_value_head=False)

    def _save_as(self, path: Path, write: Callable[[Any, Path], None], *, with_value_head: bool) -> None:
        """Write a folder atomically; `write` writes the module, and the tokenizer is added."""

        def fill(folder: Path) -> None:
            write_network(folder, self.module, self.value_head if with_value_head else None, write)
            save_tokenizer(self.tokenizer, folder, path)
            if self.reads_images:
                copy_image_processor(self.tokenizer, folder)

        save_folder(path, fill)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that training changes: weights, optimizer moments and step counts.

        `load_state_dict` resumes from this state without any difference from an uninterrupted run.
        """
        return self._state.state_dict()

    def fixed_weights(self) -> dict[str, Any]:
        """See `PipelinableEngine.fixed_weights`."""
        return self._state.fixed_weights()

    def load_state_dict(self, state: Mapping[str, Any], *, weights_only: bool = False) -> None:
        """Restore the state that `state_dict` returned; see `EngineState.load_state_dict`."""
        self._state.load_state_dict(state, weights_only=weights_only)

    def resident(self) -> Iterator[Tensor]:
        """Iterate over tensors kept on the device between calls: weights, buffers, moments and averages."""
        return self._state.resident()

    def _trained(self) -> Stepper:
        if self._stepper is None:
            raise ValueError(f"models.{self.name}: a model without an optimizer cannot train. Set optimizer.lr.")
        return self._stepper

    def dropout_seed(self) -> int:
        """Return the seed of the dropout masks in the next `accumulate`."""
        return derive_seed(self._seed, self.name, "dropout", self._trained().optimizer_steps)

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Enter the context of training passes, see `TrainingModes`."""
        with self._modes.entered(self.dropout_seed), self.network.replaying():
            yield


def differentiate_with_hidden(hidden_RH: Tensor, loss: Tensor) -> None:
    """Accumulate the gradient of `loss`, and pass through all layers even if the loss does not reach them."""
    roots = [(hidden_RH, torch.zeros_like(hidden_RH)), (loss, torch.ones_like(loss))]
    if found := [(root, seed) for root, seed in roots if root.requires_grad]:
        torch.autograd.backward([root for root, _ in found], [seed for _, seed in found])


def _magnitude(count: int) -> str:
    """Return a number such as `135M`."""
    for unit, size in {"B": 10**9, "M": 10**6, "k": 10**3}.items():
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)

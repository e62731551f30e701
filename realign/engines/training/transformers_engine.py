"""`TransformersEngine`: runs and trains one transformers model on packed sequences, in one process.

The engine splits a batch into micro-batches by a token budget. Results do not depend on the split. A loss function
returns sums, and the accumulated gradient is divided once, by the weight of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from realign.api.engine import Agree, EngineCapabilities, LossFn, LossWeightFn, StepIf
from realign.api.microbatch import MicroBatchSpec
from realign.api.sample import TOKENS, SequenceSample
from realign.api.seeds import derive_seed
from realign.api.stats import LossStats, Stats, keep_traces, merge_stats
from realign.engines.training.engine_state import EngineState, ModelSaver
from realign.engines.training.expert_load import LoadBalancer, StepLoad, counting, differentiate_with_hidden, listening
from realign.engines.training.inference_engine import InferenceEngine
from realign.engines.training.load_balancing import LoadBalancing
from realign.engines.training.nonfinite import Accumulated, origin_in
from realign.engines.training.optimizer import OptimizerSpec
from realign.engines.training.stepper import Stepper, as_count, single, step_weight
from realign.engines.training.weights import WeightAverage
from realign.errors import ConfigError
from realign.models.host import Host
from realign.models.network.abilities import prepare_module
from realign.models.network.network import Network
from realign.models.network.output import PackedOutput
from realign.models.network.passes import Layout, Passes, side_by_side
from realign.models.network.settings import NetworkSettings
from realign.models.network.value_head import TargetUpdate, ValueNetwork
from realign.samplers.in_process.settings import InProcessSampling


class TransformersEngine(InferenceEngine):
    """Single-process engine. Implements `realign.api.PipelinableEngine`.

    The weights are fp32. Between calls the model is in eval mode.
    """

    def __init__(
        self,
        name: str,
        module: Any,
        tokenizer: Any,
        settings: NetworkSettings | None = None,
        *,
        seed: int,
        sampling: InProcessSampling | None = None,
        value_head: ValueNetwork | None = None,
        optimizer: OptimizerSpec | None = None,
        gradient_checkpointing: bool = False,
        load_balancing: LoadBalancing | None = None,
        probed: Any = None,
        host: Host | None = None,
    ) -> None:
        """Wrap and probe a transformers model that was loaded in fp32 with `attn_implementation=ATTENTION`.

        Args:
            name: role of the model, used in messages and seeds.
            module: the model, on its device.
            tokenizer: saved with the model; its end token ends responses.
            settings: how the network computes its passes; None means the defaults.
            seed: root seed of the run.
            sampling: settings of rollouts; None means the defaults.
            value_head: value network of this model, on its device.
            optimizer: trains the parameters that require a gradient; None freezes the model.
            gradient_checkpointing: recompute layers in the backward pass.
            load_balancing: balances the experts in training; None if not.
            probed: a small model of the same architecture to probe instead, if the weights of `module` are unread.
            host: reads values of tensors.

        Raises:
            ConfigError: the model family is not supported.
        """
        self.host = host or Host()
        settings = (settings or NetworkSettings()).restrict(load_balancing=load_balancing is not None)
        self._balancer = LoadBalancer(name, module, load_balancing)  # before a sharded network divides the routers
        network = self._network(name, module, settings, value_head, probed)
        super().__init__(name, network, tokenizer, sampling or InProcessSampling(), seed=seed)
        self._balancer.check(network.abilities.unpacked)
        if optimizer is None:
            network.requires_grad_(False)
        self._modes = _TrainingModes(network, dropout=settings.dropout, gradient_checkpointing=gradient_checkpointing)
        self._stepper = self._make_stepper(optimizer) if optimizer else None
        decay = optimizer.ema_decay if optimizer else None
        self._average = None if decay is None else WeightAverage(network.own_parameters(), decay)
        self._targets = self._target_update()
        self._state = EngineState(name, network, self.fusion, self._stepper, self._average)
        self._saver = self._make_saver()
        self._accumulated: Accumulated | None = None
        self._agree: Agree | None = None
        self._load: StepLoad | None = None

    def _network(
        self, name: str, module: Any, settings: NetworkSettings, value_head: ValueNetwork | None, probed: Any
    ) -> Network:
        abilities = prepare_module(name, module, settings, value_head, probed)
        return Network(name, module, settings, abilities, value_head, self.host)

    def _make_stepper(self, spec: OptimizerSpec) -> Stepper:
        return Stepper(self.name, spec, self.network.own_parameters(), self.network.embedding_and_head_ids(), self.host)

    def _target_update(self) -> TargetUpdate | None:
        """Return the update of target Q heads after optimizer steps; None without Q heads."""
        if self.value_head is None or self.value_head.spec.q_heads is None:
            return None
        names = [name for name, _ in self.network.named_parameters()]
        return TargetUpdate(names, self.network.own_parameters(), self.value_head.spec.q_heads.target_rate)

    def _make_saver(self) -> ModelSaver:
        return ModelSaver(self.name, self.network, self.tokenizer, self._average)

    @override
    def capabilities(self) -> EngineCapabilities:
        return replace(super().capabilities(), trainable=self._stepper is not None)

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
        part = self._own_part("train_batch", data)
        weight = step_weight(data, loss_weight_fn)  # stays where the batch is: a kernel takes it as a number
        # The weight of the whole batch, not of the part: all micro-batches and ranks divide by the same number (ADR 1).
        if float(weight) == 0:
            if self._agree is not None:  # the same mini-batch of the other models waits for an answer
                self._agree(True)
            return self.skip("zero_weight_steps")
        stats = self._over_ranks(self.accumulate(part, mb_spec, loss_fn, weight))
        vetoed = self._agree is not None and not self._agree(self.finite())
        vetoed |= step_if is not None and not step_if(stats)
        return {**stats, **self.apply(weight, vetoed=vetoed)}

    @override
    def agree_on_steps(self, agree: Agree | None) -> None:
        self._agree = agree

    def finite(self) -> bool:
        """Return whether the loss and the gradient from `accumulate` are finite."""
        loss = self._total_loss(self._gradient().losses)
        return bool((loss + self._require_stepper().gradient_norm().to(loss.device)).isfinite())

    def _gradient(self) -> Accumulated:
        if self._accumulated is None:
            raise ValueError(f"model {self.name!r}: apply has no gradient. Call accumulate first.")
        return self._accumulated

    def _own_part(self, method: str, data: SequenceSample) -> SequenceSample:
        """Return the prompts of a batch that this process computes; `method` is the caller, for messages."""
        return data

    def _over_ranks(self, stats: Stats) -> Stats:
        """Merge the metrics of all data-parallel ranks."""
        return stats

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
        stepper = self._require_stepper()
        stepper.zero_grad()
        if self._balancer.routers is not None:  # its loss has a gradient in each pass
            mb_spec = replace(mb_spec, zero_key=None)
        passes = self.network.passes(part, mb_spec, parallel=True, training=True)
        load = self._start_load(passes, range(0))

        def run(
            here: SequenceSample, layout: Layout, *, through_layers: bool
        ) -> tuple[PackedOutput, Tensor, LossStats]:
            moved = here.to(self.device)
            with counting(load, layout):
                output = self.network.run(here, moved, layout, training=True, through_layers=through_layers)
            loss, stats = loss_fn(output, moved)
            check_loss(loss)
            return output, loss, keep_traces(stats, moved, mb_spec)

        def compute(numbered: tuple[int, tuple[SequenceSample, Layout]]) -> tuple[Tensor, Any, list[Tensor | None]]:
            number, micro_batch = numbered
            has_gradient = number < len(passes.batches) - passes.without_gradient
            output, loss, stats = run(*micro_batch, through_layers=has_gradient)
            if not has_gradient:
                if self._has_gradient(loss, output):  # from another term of the loss
                    output, loss, stats = run(*micro_batch, through_layers=True)
                else:
                    loss = loss.detach()
            gradients: list[Tensor | None] = []
            # The balancing loss enters inside of the layers, so the backward pass must run through all of them, even if
            # `loss` reaches none.
            if load is not None:
                differentiate_with_hidden(output.hidden_RH, loss / weight)
            # Lanes are threads: `backward` would add to `parameter.grad` in the order in which they finish, and the sum
            # would depend on their speed. A micro-batch without trainable tokens has a loss without gradient.
            # The first micro-batch may call it: the others are added later, and torch keeps its tensors without a copy.
            elif loss.requires_grad and passes.lanes > 1 and number > 0:
                gradients = stepper.differentiate(loss / weight)
            elif loss.requires_grad:
                (loss / weight).backward()
            return loss.detach().float(), stats, gradients

        losses: list[Tensor] = []
        metrics: list[Any] = []  # also accepts plain (sum, count) pairs
        with self._training(), listening(load):
            for loss, stats, gradients in side_by_side(compute, enumerate(passes), passes.lanes):
                if gradients:  # in micro-batch order, whichever finished first
                    stepper.accumulate(gradients)
                    gradients.clear()  # else this copy would wait in memory for the next one
                losses.append(loss)
                metrics.append(stats)
        self.network.forget_rounded()
        self._accumulated = Accumulated(passes, losses, loss_fn)
        return merge_stats(metrics) | self._counts(part, passes) | self._load_metrics(load) | self._replay_metrics()

    def _has_gradient(self, loss: Tensor, output: PackedOutput) -> bool:
        """Return whether a loss of which no gradient passes through the layers has one that is not 0."""
        if not loss.requires_grad:
            return False
        ends = [output.hidden_RH, *self._require_stepper().parameters]
        return any(x is not None and bool(x.any()) for x in torch.autograd.grad(loss, ends, allow_unused=True))

    def _start_load(self, passes: Passes, idle: range) -> StepLoad | None:
        """Start to balance the experts in a step; `idle` are passes that only other ranks need."""
        return self._balancer.start(len(passes.batches), lambda load: self._count_load(load, passes), self._sum_ranks)

    @torch.no_grad()
    def _count_load(self, load: StepLoad, passes: Passes) -> None:
        # Counts of an earlier pass, such as the rollout, would be those of other weights (ADR 32).
        for here, layout in passes:
            with counting(load, layout):
                self.network.run(here, here.to(self.device), layout)

    def _load_metrics(self, load: StepLoad | None) -> Stats:
        self._load = load
        return {} if load is None else load.metrics(self._sum_ranks)

    def _replay_metrics(self) -> Stats:
        return {} if self.network.abilities.replay is None else self.network.abilities.replay.take_stats()

    def _sum_ranks(self, x: Tensor) -> Tensor:
        return x

    def _counts(self, part: SequenceSample, passes: Passes) -> Stats:
        return {
            "tokens": as_count(part.lengths[TOKENS].total),
            "shared_tokens": as_count(passes.saved),
            "n_microbatches": single(len(passes.batches)),
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
        stepper, done = self._require_stepper(), self._gradient()
        self._accumulated = None
        steps = stepper.optimizer_steps
        culprits = partial(self._nonfinite_origin, done, weight)
        stats = stepper.step(self._total_loss(done.losses), weight, vetoed=vetoed, culprits=culprits)
        # A skipped step changes nothing, so averages, target heads and routing biases stay too (ADR 7).
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
        return self._require_stepper().report(skipped=reason)

    def _total_loss(self, losses: Sequence[Tensor]) -> Tensor:
        """Return the sum over the batch of the losses that `loss_fn` returned."""
        # A rank without prompts has no loss, and `stack` needs at least one tensor.
        return torch.stack([torch.zeros((), device=self.device), *losses]).sum()

    def _nonfinite_origin(self, done: Accumulated, weight: Tensor) -> str:
        """Describe the source of a non-finite loss or gradient, and leave no gradient behind."""
        with self._training():
            return origin_in(done, self.network, self._require_stepper(), weight)

    @override
    def updates_begun(self) -> int | None:
        return None if self._stepper is None else self._stepper.updates_begun

    @override
    def start_step(self, version: int) -> None:
        if self._stepper is not None:
            self._stepper.train_steps = version

    @override
    def save(self, path: Path) -> None:
        """Create or replace a model folder atomically, when it is complete.

        If the engine keeps averaged weights, it also saves them, in a folder with the suffix `_ema`.

        Raises:
            RunError: a weight is not finite.
            ConfigError: `path` is a symbolic link.
            OSError: the folder cannot be written.
        """
        self._saver.save(path)

    @property
    def adapter_rank(self) -> int | None:
        """Rank of the LoRA adapters; None if the model has none."""
        return self.network.trains.adapter_rank

    def save_adapter(self, path: Path) -> None:
        """Write the LoRA adapters alone, as a folder of peft; see `save` for the errors."""
        self._saver.save_adapter(path)

    def save_base(self, path: Path) -> None:
        """Write the model without its LoRA adapters; see `save` for the errors."""
        self._saver.save_base(path)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that training changes: weights, optimizer moments and step counts.

        `load_state_dict` resumes from this state without any difference from an uninterrupted run.
        """
        return self._state.state_dict()

    @override
    def fixed_weights(self) -> dict[str, Any]:
        return self._state.fixed_weights()

    def load_state_dict(self, state: Mapping[str, Any], *, weights_only: bool = False) -> None:
        """Restore the state that `state_dict` returned; see `EngineState.load_state_dict`."""
        self._state.load_state_dict(state, weights_only=weights_only)

    def resident(self) -> Iterator[Tensor]:
        """Iterate over tensors kept on the device between calls: weights, buffers, moments and averages."""
        return self._state.resident()

    def _require_stepper(self) -> Stepper:
        if self._stepper is None:
            raise ValueError(f"models.{self.name}: a model without an optimizer cannot train. Set optimizer.lr.")
        return self._stepper

    def dropout_seed(self) -> int:
        """Return the seed of the dropout masks in the next `accumulate`."""
        return derive_seed(self._seed, self.name, "dropout", self._require_stepper().optimizer_steps)

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Enter the context of training passes, see `_TrainingModes`."""
        with self._modes.enter(self.dropout_seed), self.network.replaying():
            yield


class _TrainingModes:
    """Module modes and random state of training passes.

    Checkpointed layers recompute only in train mode. Without dropout all other modules stay in eval mode, so that
    training and scoring passes compute the same. The dropout of adapters has a separate rate.
    """

    def __init__(self, network: Network, *, dropout: float, gradient_checkpointing: bool) -> None:
        """Enable gradient checkpointing if requested; dropout stays off until `enter`.

        Raises:
            ConfigError: the model has no dropout.
        """
        self._network = network
        self._dropout = dropout > 0
        self._checkpointed = _enable_checkpointing(network) if gradient_checkpointing else []
        if self._dropout:
            adapters = {id(layer) for layer in network.trains.dropouts(network)}
            if not _set_dropout((part for part in network.module.modules() if id(part) not in adapters), dropout):
                raise ConfigError(f"models.{network.name}.dropout={dropout:g}: the model has no dropout.")
        else:
            _set_dropout(self._checkpointed, 0.0)  # these are in train mode

    @contextmanager
    def enter(self, dropout_seed: Callable[[], int]) -> Iterator[None]:
        """Set modes and random state for a training pass, and restore them on exit.

        Args:
            dropout_seed: returns the seed of the dropout masks; called only if a dropout is active.
        """
        with ExitStack() as stack:
            # Before any mode changes, so that an error in a pass can't leave the model in train mode.
            stack.callback(self._network.eval)
            adapter_dropouts = self._network.trains.dropouts(self._network)
            if self._dropout or adapter_dropouts:
                # The masks depend on the seed alone, so a resumed run draws the same, and the run's own generator stays
                # where it is.
                stack.enter_context(torch.random.fork_rng())
                torch.manual_seed(dropout_seed())
            if self._dropout:
                self._network.train()
            for dropout in adapter_dropouts:
                dropout.train()
            for layer in self._checkpointed:
                # Only the flag of the layer: `train()` would enable the dropout of its parts as well.
                layer.training = True
            yield


def _set_dropout(parts: Iterable[nn.Module], rate: float) -> int:
    """Set the rate of modules that drop values, and return how many rates there are."""
    count = 0
    for part in parts:
        # most layers of transformers store their rates as plain floats; `layerdrop` of OPT drops whole layers
        rates = ["p"] if isinstance(part, nn.Dropout) else [n for n, x in vars(part).items() if isinstance(x, float)]
        for name in rates:
            if name == "p" or "dropout" in name or (name == "layerdrop" and not rate):
                setattr(part, name, rate)
                count += 1
    return count


def _enable_checkpointing(network: Network) -> list[Any]:
    """Enable gradient checkpointing, and return the modules that check their own `training` flag for it."""
    module: Any = network.module
    # transformers is renaming this method: use the new name if it exists
    enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
    # torch enters autocast again for the second pass, but no context of ours
    enable({"use_reentrant": False, "context_fn": lambda: (nullcontext(), network.autocast())})
    # transformers also hooks the embeddings, for reentrant checkpointing. The hook would disable the fused rollout and
    # make the backward pass go through frozen layers.
    module.disable_input_require_grads()
    return [m for m in module.modules() if getattr(m, "gradient_checkpointing", False)]


def check_loss(loss: Tensor) -> None:
    """Raise ValueError unless `loss`, returned by a `loss_fn`, is a 0-d floating-point sum."""
    if loss.ndim or loss.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"loss_fn returned {loss.dtype} {list(loss.shape)}. It must return a 0-d float32 sum.")

"""`TransformersEngine`: runs and trains one transformers model on packed sequences, in one process.

A batch is cut into micro-batches by token budget. Nothing that it computes depends on the cut: a loss returns sums,
and the gradient of all micro-batches is divided once, by the weight of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realign.api.data import TOKENS, SequenceSample
from realign.api.microbatch import MicroBatchSpec
from realign.api.model import GenerationConfig, LossFn, LossWeightFn, PostHook, StepIf, derive_seed
from realign.api.stats import Stats, merge_stats
from realign.engines.attention import CONTEXT, Backend, PackedContext, packed_inputs
from realign.engines.folders import save_folder
from realign.engines.loading import read_head
from realign.engines.optim import OptimizerSpec
from realign.engines.output import PackedOutput, ScalarHead
from realign.engines.probe import probe
from realign.engines.stepping import Stepper, counted, single
from realign.functional.logprobs import LMHead


class TransformersEngine:
    """Implements `realign.api.PipelinableEngine`. The weights are fp32; between calls the model is in eval mode."""

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
        max_nonfinite_in_a_row: int = 5,
    ) -> None:
        """Take over a transformers model that was loaded in fp32 with `attn_implementation=ATTENTION`, and probe it.

        Args:
            name: the role, for messages and seeds.
            module: the model, on its device.
            tokenizer: saved with the model; its end token ends responses.
            seed: the run's root seed.
            optimizer: None freezes the model.
            dtype: of matrix products; bfloat16 is autocast.
            attention: kernel of packed attention.
            gradient_checkpointing: recompute layers in the backward pass.
            dropout: apply the model's dropout in `train_batch`.
            max_nonfinite_in_a_row: skipped optimizer steps in a row that end the run.

        Raises:
            ValueError: the model family cannot run packed.
        """
        self.name = name
        self.module = module.eval().requires_grad_(optimizer is not None)
        self.tokenizer = tokenizer
        self.head = read_head(module)
        self.device: torch.device = next(module.parameters()).device
        self._training_head = read_head(module, dropout=dropout)
        self._seed = seed
        self._attention = attention
        self._dropout = dropout
        self._autocast: Callable[[], AbstractContextManager[Any]] = partial(
            torch.autocast, self.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16
        )
        probe(module, self.head, attention=attention, autocast=self._autocast if dtype == torch.bfloat16 else None)
        self._checkpointed = _enable_checkpointing(module, dropout) if gradient_checkpointing else []
        self._stepper = (
            Stepper(name, optimizer, module.parameters(), max_nonfinite_in_a_row=max_nonfinite_in_a_row)
            if optimizer
            else None
        )

    @property
    def trainable(self) -> bool:
        """Whether an optimizer was configured."""
        return self._stepper is not None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End tokens: the tokenizer's and those of the model's `generation_config`, of which nothing else is used."""
        found: set[int] = set()
        for source in (self.tokenizer, getattr(self.module, "generation_config", None)):
            ids = getattr(source, "eos_token_id", None)
            found.update([] if ids is None else [ids] if isinstance(ids, int) else ids)
        return tuple(sorted(found))

    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        """See `PipelinableEngine.forward`. Dropout is never applied here.

        Raises:
            ValueError: the hook added no key, or one of another number of sequences.
        """
        batches = data.split(mb_spec)
        results = []
        with torch.no_grad():
            for part in batches:
                moved = part.to(self.device)
                results.append(_added(post_hook(self._run(part, moved, self.head), moved), moved))
        whole = batches.restore(results).to(data[TOKENS].device)
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

        Metrics of the engine: `loss`, `grad_norm` (before clipping), `lr`, `tokens`, `n_microbatches`, and counts of
        optimizer steps: taken (`optimizer_steps`), skipped (`skipped_steps`), and by reason `zero_weight_steps`,
        `zero_gradient_steps`, `nonfinite_steps`, `vetoed_steps`.

        Raises:
            ValueError: the model is frozen, the loss is no fp32 scalar, or the weight is negative or not finite.
            FloatingPointError: the last of `max_nonfinite_in_a_row` steps in a row had a non-finite loss or gradient.
        """
        stepper = self._trained()
        weight = self.reduce(loss_weight_fn(data).detach().to(self.device, torch.float32))
        if not 0 <= float(weight) < float("inf"):
            raise ValueError(f"loss_weight_fn must return a finite number of at least 0, found {float(weight)}")
        if float(weight) == 0:
            return stepper.report(self.device, skipped="zero_weight_steps")
        stepper.zero_grad()
        batches = data.split(mb_spec)
        losses: list[Tensor] = [torch.zeros((), device=self.device)]
        metrics: list[Any] = []  # plain (sum, count) pairs are merged too
        with self._training():
            for part in batches:
                moved = part.to(self.device)
                loss, stats = loss_fn(self._run(part, moved, self._training_head), moved)
                _check_loss(loss)
                if loss.requires_grad:
                    (loss / weight).backward()
                losses.append(loss.detach().float())
                metrics.append(stats)
        merged = merge_stats(metrics)
        vetoed = step_if is not None and not step_if(merged)
        own = stepper.step(torch.stack(losses).sum(), weight, vetoed=vetoed)
        own["tokens"] = counted(data.lengths[TOKENS].total, self.device)
        own["n_microbatches"] = single(len(batches), self.device)
        return {**merged, **own}

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """See `PipelinableEngine.generate`.

        Raises:
            ValueError: the model has a scalar head, or the settings do not fit it.
        """
        from realign.engines.generation import generate

        if not isinstance(self.head, LMHead):
            raise ValueError(f"model {self.name!r} has a scalar head and cannot generate; use head=causal")
        with torch.no_grad(), self._autocast():
            return generate(
                self.module,
                self.head,
                data,
                config,
                seed=seed,
                eos_token_ids=self.eos_token_ids,
                tokenizer=self.tokenizer,
            )

    def reduce(self, x: Tensor) -> Tensor:
        """The sum over data-parallel ranks: `x`, in one process."""
        return x

    def start_step(self, version: int) -> None:
        """See `PipelinableEngine.start_step`."""
        if self._stepper is not None:
            self._stepper.train_steps = version

    def save(self, path: Path) -> None:
        """See `PipelinableEngine.save`. The folder appears, or is replaced, only when it is complete.

        Raises:
            ValueError: a weight is not finite.
        """
        for name, x in self.module.state_dict().items():
            if x.is_floating_point() and not bool(x.isfinite().all()):
                raise ValueError(f"model {self.name!r} is not saved: weight {name!r} is not finite")
        save_folder(self.module, self.tokenizer, Path(path))

    def state_dict(self) -> dict[str, Any]:
        """Weights, moments and counts: what `load_state_dict` needs to go on as if never interrupted."""
        return {"module": self.module.state_dict(), "stepper": self._stepper.state_dict() if self._stepper else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave.

        Raises:
            ValueError: the state is of a frozen model and this one is not, or the other way round.
        """
        if (state["stepper"] is not None) != self.trainable:
            frozen, trained = ("saved state", "engine") if self.trainable else ("engine", "saved state")
            raise ValueError(f"model {self.name!r}: the {frozen} has no optimizer, but the {trained} has one")
        self.module.load_state_dict(state["module"])
        if self._stepper is not None:
            self._stepper.load_state_dict(state["stepper"])

    def _trained(self) -> Stepper:
        if self._stepper is None:
            raise ValueError(f"model {self.name!r} has no optimizer and cannot be trained; give it one under optimizer")
        return self._stepper

    def _run(self, part: SequenceSample, moved: SequenceSample, head: LMHead | ScalarHead) -> PackedOutput:
        """The packed forward pass of a micro-batch; `moved` is `part` on the engine's device."""
        ids_T, cu_seqlens = moved[TOKENS], part.cu_seqlens()  # where the data is: usually on the host
        if len(ids_T):
            there = cu_seqlens.to(self.device, non_blocking=True)
            context = PackedContext(there, self._attention, part.lengths[TOKENS].flat.tolist())
            with self._autocast():
                out = self.module.base_model(**packed_inputs(ids_T, cu_seqlens), **{CONTEXT: context})
            hidden_TH = out.last_hidden_state[0]
        else:
            weight = head.weight_VH if isinstance(head, LMHead) else head.weight_1H
            hidden_TH = weight.new_zeros(0, weight.shape[1])
        return PackedOutput(hidden_TH, head, ids_T, cu_seqlens, self._autocast)

    @contextmanager
    def _training(self) -> Iterator[None]:
        """The state of modules and random numbers in which a training pass runs.

        Checkpointed layers recompute only in train mode. Without dropout nothing else is put in that mode, so that
        `train_batch` and `forward` compute the same.
        """
        with ExitStack() as stack:
            stack.callback(self.module.eval)
            if self._dropout:
                stack.enter_context(torch.random.fork_rng())
                torch.manual_seed(derive_seed(self._seed, self.name, "dropout", self._trained().optimizer_steps))
                self.module.train()
            for layer in self._checkpointed:
                layer.training = True
            yield


def _enable_checkpointing(module: Any, dropout: bool) -> list[Any]:
    """Let layers recompute; give the modules that look at their own `training` for it."""
    # transformers renames the method: the new name is taken where it is known
    enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
    enable()
    checkpointed = [m for m in module.modules() if getattr(m, "gradient_checkpointing", False)]
    for layer in [] if dropout else checkpointed:
        for name, x in vars(layer).items():  # opt's layers hold their rates as plain numbers
            if isinstance(x, float) and ("dropout" in name or name == "layerdrop"):
                setattr(layer, name, 0.0)
    return checkpointed


def _added(result: SequenceSample, micro_batch: SequenceSample) -> SequenceSample:
    """The keys of `result` that are not those of the micro-batch."""
    new = [k for k, x in result.data.items() if x is not micro_batch.data.get(k)]
    if not new:
        raise ValueError(f"post_hook added no key: its result has the same {sorted(result.data)} as the micro-batch")
    return result.select(new)


def _check_loss(loss: Tensor) -> None:
    if loss.ndim or loss.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"loss_fn must return a sum, a 0-d float32 tensor; found {loss.dtype} {list(loss.shape)}")

"""Train on DeepSpeed ZeRO: an engine around somebody else's distributed engine, in one file.

Gradients (stage 2) and optimizer state (stages 1 and 2) are divided over the ranks; every rank keeps the weights.
Install DeepSpeed first: pip install 'realign-rl[deepspeed]'

realign experiment=sft_arithmetic models.actor._target_=examples.deepspeed_engine.DeepSpeedModel
torchrun --nproc-per-node 2 -m realign experiment=grpo_arithmetic \
    models.actor._target_=examples.deepspeed_engine.DeepSpeedModel models.actor.stage=1
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from realign.api.engine import Forward, LossFn, PostHook, run_loss
from realign.api.generation import GenerationConfig
from realign.api.lengths import Lengths
from realign.api.memory import MemoryWork, RoleMemory
from realign.api.microbatch import MicroBatchSpec
from realign.api.sample import TOKENS, SequenceSample, shard
from realign.api.seeds import derive_seed
from realign.api.stats import Stats, keep_traces, merge_stats, on_host
from realign.engines import OptimizerSpec, Sharding, TransformersModel
from realign.engines.distributed.consistency import check_same_batch
from realign.engines.training.nonfinite import Accumulated
from realign.engines.training.stepper import Stepper
from realign.engines.training.transformers_engine import TransformersEngine, check_loss
from realign.errors import ConfigError
from realign.models import Causal
from realign.models.network.heads import read_body
from realign.models.network.network import Network
from realign.models.network.passes import ParallelPasses
from realign.models.network.settings import NetworkSettings
from realign.ranks import current
from realign.settings import Range

NOTHING = SequenceSample(())
"""The result of a rank without prompts."""

TOKEN = SequenceSample(("idle",), {TOKENS: torch.zeros(1, dtype=torch.int64)}, {TOKENS: Lengths.of([[1]])})
"""The micro-batch of a rank without one, since all ranks reduce their gradients together."""


@dataclass
class DeepSpeedModel(TransformersModel):
    """A transformers model that DeepSpeed ZeRO trains.

    Attributes:
        stage: What the ranks divide: 1 is the optimizer state, 2 also the gradients.
    """

    stage: Annotated[int, Range(ge=1, le=2)] = 2

    @override
    def check(self, name: str) -> None:
        if find_spec("deepspeed") is None:
            raise ConfigError(f"models.{name}: DeepSpeed is not installed. Run pip install 'realign-rl[deepspeed]'.")
        if self.sharding != Sharding():
            raise ConfigError(f"models.{name}.sharding: has no effect on DeepSpeed. Set models.{name}.stage instead.")
        value_head = self.head.value_head if isinstance(self.head, Causal) else None
        unsupported = {
            "load_balancing": self.load_balancing is not None,
            "head.value_head.q_heads": value_head is not None and value_head.q_heads is not None,
        }
        for key in (key for key, is_set in unsupported.items() if is_set):
            raise ConfigError(f"models.{name}.{key}: not supported with DeepSpeed. Remove it.")
        if self.optimizer is not None and not self.optimizer.elementwise:
            raise ConfigError(
                f"models.{name}.optimizer={self.optimizer.label}: it updates whole weights, but ZeRO divides them. "
                "Use an optimizer that works element by element, such as AdamW."
            )
        super().check(name)

    @override
    def memory(self, name: str, work: MemoryWork) -> RoleMemory:
        alone = super().memory(name, replace(work, ranks=1))
        own = alone.weights // work.ranks if work.trains else 0  # the slice that the optimizer updates, in fp32
        return replace(alone, weights=alone.weights + own, moments=alone.moments // work.ranks)

    @property
    @override
    def _reads_slices(self) -> bool:
        return False

    @override
    def make_engine(self, *arguments: Any, **further: Any) -> TransformersEngine:
        return DeepSpeedEngine(*arguments, stage=self.stage, **further)


class DeepSpeedEngine(TransformersEngine):
    """Every rank calls every method with the same batch, and computes its part of the prompts.

    Every weight that trains gets a gradient, of 0 if no loss reaches it.
    """

    def __init__(
        self, name: str, module: Any, tokenizer: Any, settings: NetworkSettings, *, stage: int, **further: Any
    ) -> None:
        if not dist.is_initialized():  # DeepSpeed needs a process group, also of one process
            backend = "nccl" if next(module.parameters()).device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        self._stage, self._ranks = stage, current()
        settings = replace(settings, parallel_passes=ParallelPasses.off)  # DeepSpeed runs one backward pass at a time
        super().__init__(name, module, tokenizer, settings, **further)
        if (unpacked := self.network.abilities.unpacked) is not None:
            raise ConfigError(f"models.{name}: DeepSpeed needs a model that can run packed. {unpacked.reason}")
        trunk = {id(p) for p in read_body(module).parameters()}
        self._heads = [p for p in self.network.parameters() if p.requires_grad and id(p) not in trunk]

    @override
    def _make_stepper(self, spec: OptimizerSpec) -> Stepper:
        return ZeroStepper(self.name, spec, self.network, self._stage)

    @property
    @override
    def data_ranks(self) -> int:
        return self._ranks.size

    @property
    @override
    def data_rank(self) -> int:
        return self._ranks.rank

    @override
    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        return self._in_parts("forward", data, TOKENS, lambda part: self.forward_part(part, mb_spec, post_hook))

    @override
    def forward_part(self, part: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        return super().forward(part, mb_spec, post_hook) if len(part) else NOTHING

    @override
    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        return self._in_parts("generate", data, "prompt_ids", lambda part: self.generate_part(part, config, seed=seed))

    @override
    def generate_part(self, part: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        return super().generate(part, config, seed=seed) if len(part) else NOTHING

    @override
    def reference(self, layers: int | None = None) -> Forward:
        run = super().reference(layers)

        def forward(data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
            return self._in_parts(
                "reference", data, TOKENS, lambda part: run(part, mb_spec, post_hook) if len(part) else NOTHING
            )

        return forward

    @override
    def measure(self, data: SequenceSample, mb_spec: MicroBatchSpec, loss_fn: LossFn) -> Stats:
        return self._over_ranks(run_loss(self.forward_part, self._own_part("measure", data), mb_spec, loss_fn))

    def _in_parts(
        self, method: str, data: SequenceSample, key: str, compute: Callable[[SequenceSample], SequenceSample]
    ) -> SequenceSample:
        """Compute this rank's part of a batch, and return the results of all ranks in the order of the batch."""
        check_same_batch(self.name, self._ranks, method, data)
        parts = shard(data, self.data_ranks, key)
        return parts.restore(self._ranks.gather(compute(parts[self.data_rank])))

    @override
    def _own_part(self, method: str, data: SequenceSample) -> SequenceSample:
        check_same_batch(self.name, self._ranks, method, data)
        return shard(data, self.data_ranks, TOKENS)[self.data_rank]

    @override
    def _over_ranks(self, stats: Stats) -> Stats:
        return merge_stats(self._ranks.gather(on_host(stats)))

    @override
    def accumulate(self, part: SequenceSample, mb_spec: MicroBatchSpec, loss_fn: LossFn, weight: Tensor) -> Stats:
        stepper = self._require_stepper()
        assert isinstance(stepper, ZeroStepper)
        stepper.zero_grad()
        passes = self.network.passes(part, mb_spec, training=True)
        micro_batches = iter(passes)
        rounds = self.host.most(len(passes.batches))
        losses: list[Tensor] = []
        metrics: list[Any] = []

        def compute() -> Tensor:
            here, layout = next(micro_batches, (TOKEN, None))
            moved = here.to(self.device)
            output = self.network.run(here, moved, layout, training=True)
            # All ranks must reduce the same tensors, whichever outputs their losses use: a gradient of 0 reaches all.
            total = 0.0 * (output.hidden_RH.sum() + sum(p.flatten()[0] for p in self._heads))
            if here is TOKEN:
                return total
            loss, stats = loss_fn(output, moved)
            check_loss(loss)
            losses.append(loss.detach().float())
            metrics.append(keep_traces(stats, moved, mb_spec))
            return total + loss / weight

        with self._training():
            for number in range(rounds):
                stepper.backward(compute, last=number == rounds - 1)
        self._accumulated = Accumulated(passes, losses, loss_fn)
        return merge_stats(metrics) | self._counts(part, passes) | self._replay_metrics()

    @override
    def _total_loss(self, losses: Sequence[Tensor]) -> Tensor:
        total = super()._total_loss(losses)
        dist.all_reduce(total)
        return total

    @override
    def _nonfinite_origin(self, done: Accumulated, weight: Tensor) -> str:
        pairs = zip(done.passes, done.losses, strict=True)
        own = [i for (part, _), loss in pairs if not bool(loss.isfinite()) for i in part.ids]
        ids = [i for gathered in self._ranks.gather(own) for i in gathered]
        return f"the loss of micro-batches with ids {ids[:8]}" if ids else "the gradient, while all losses are finite"

    @override
    def dropout_seed(self) -> int:
        return derive_seed(super().dropout_seed(), self.data_rank)

    @override
    def load_weights(self, weights: Mapping[str, Tensor], mix: float = 1.0) -> None:
        super().load_weights(weights, mix)
        self._refresh()

    @override
    def load_state_dict(self, state: Mapping[str, Any], *, weights_only: bool = False) -> None:
        super().load_state_dict(state, weights_only=weights_only)
        self._refresh()

    def _refresh(self) -> None:
        if isinstance(self._stepper, ZeroStepper):
            self._stepper.refresh()

    @override
    def save(self, path: Path) -> None:
        save = super().save
        self._ranks.lead(lambda: save(path))

    @override
    def save_adapter(self, path: Path) -> None:
        save = super().save_adapter
        self._ranks.lead(lambda: save(path))

    @override
    def save_base(self, path: Path) -> None:
        save = super().save_base
        self._ranks.lead(lambda: save(path))


class Pass(nn.Module):
    """What DeepSpeed sees as the model: a network whose forward pass ends with the loss."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    @override
    def forward(self, compute: Callable[[], Tensor]) -> Tensor:
        return compute()


class ZeroStepper(Stepper):
    """A stepper whose optimizer DeepSpeed runs. Its state is that of one process, so any engine resumes from it.

    DeepSpeed joins the weights of each group of the optimizer into one vector, in order, and each rank updates its
    slice of the vector. `optimizer` names the weights and never steps; `_sharded` updates the slices.
    """

    def __init__(self, name: str, spec: OptimizerSpec, network: Network, stage: int) -> None:
        import deepspeed

        super().__init__(name, spec, network.own_parameters(), host=network.host)
        self._ranks = current()
        self._sharded: Any = spec.build(self.parameters)
        self._update, self._pending, self._discards = self._sharded.step, False, False
        # DeepSpeed cannot drop a gradient: it takes a step, in which the optimizer then does nothing.
        self._sharded.step = lambda closure=None: None if self._discards else self._update()
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        os.environ.setdefault("LOCAL_RANK", str(self._ranks.rank))  # DeepSpeed refuses to start without it
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": spec.grad_clip or 0.0,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        self._engine: Any = deepspeed.initialize(
            model=Pass(network), optimizer=self._sharded, config=config, dist_init_required=False
        )[0]

    def backward(self, compute: Callable[[], Tensor], *, last: bool) -> None:
        """Add the gradient of a loss, which `compute` returns, summed over the ranks."""
        self._engine.set_gradient_accumulation_boundary(last)
        loss = self._engine(compute)
        # DeepSpeed takes the mean over the ranks.
        self._engine.backward(loss * self._ranks.size, scale_wrt_gas=False)
        self._pending = True

    @override
    def gradient_norm(self) -> Tensor:
        norm: Tensor = torch.as_tensor(self._engine.optimizer.scaled_global_norm())
        return norm

    @override
    def update(self, norm: Tensor) -> None:
        self.spec.set_step(self._sharded, lr=self.lr, step=self.optimizer_steps + 1)
        self._step(discards=False)

    @override
    def zero_grad(self) -> None:
        if self._pending:
            self._step(discards=True)

    def _step(self, *, discards: bool) -> None:
        self._discards, self._pending = discards, False
        self._engine.step()

    def refresh(self) -> None:
        """Take over weights that were changed outside of the optimizer."""
        for parameters, own in self._groups():
            own.data.copy_(self._slice([p.detach() for p in parameters], own))

    def _groups(self) -> Iterator[tuple[list[nn.Parameter], nn.Parameter]]:
        """Iterate over the groups of the optimizer: the weights, and this rank's slice of their vector."""
        for group, sharded in zip(self.optimizer.param_groups, self._sharded.param_groups, strict=True):
            yield group["params"], sharded["params"][0]

    def _slice(self, tensors: Sequence[Tensor], own: Tensor) -> Tensor:
        """Return this rank's slice of the vector that joins the tensors of a group."""
        joined = torch.cat([x.reshape(-1) for x in tensors])
        padded = nn.functional.pad(joined, (0, own.numel() * self._ranks.size - joined.numel()))
        return padded.narrow(0, self._ranks.rank * own.numel(), own.numel())

    def _whole(self, part: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of a group, of whose vector each rank has a part; collective."""
        joined = part.new_empty(part.numel() * self._ranks.size)
        dist.all_gather_into_tensor(joined, part.contiguous())
        sizes = [p.numel() for p in parameters]
        pieces = joined[: sum(sizes)].split(sizes)
        return [x.clone().view_as(p) for x, p in zip(pieces, parameters, strict=True)]

    @override
    def moments(self) -> Iterator[Tensor]:
        for state in self._sharded.state.values():
            yield from (x for x in state.values() if isinstance(x, Tensor))

    @override
    def state_dict(self) -> dict[str, Any]:
        for parameters, own in self._groups():
            for name, x in self._sharded.state.get(own, {}).items():
                values = self._whole(x, parameters) if x.ndim else [x.clone() for _ in parameters]
                for p, value in zip(parameters, values, strict=True):
                    self.optimizer.state[p][name] = value
        state = super().state_dict()
        self.optimizer.state.clear()
        return state

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._sharded.state.clear()
        for parameters, own in self._groups():
            moments = [self.optimizer.state[p] for p in parameters]
            for name, x in moments[0].items():
                joined = self._slice([of[name] for of in moments], own).clone() if x.ndim else x.clone()
                self._sharded.state[own][name] = joined
        self.optimizer.state.clear()

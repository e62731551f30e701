"""`ShardedEngine`: runs and trains one transformers model with weights and batches sharded over several processes.

Every rank calls every method with the same whole batch. It computes its own part of the prompts, and returns the
single-process result. `accumulate` and the methods whose names end in `_part` receive only the rank's part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from realign.api.engine import (
    EngineCapabilities,
    Forward,
    LossFn,
    PostHook,
    copy_head,
    run_loss,
)
from realign.api.generation import GenerationConfig
from realign.api.lengths import Lengths
from realign.api.microbatch import MicroBatchSpec
from realign.api.sample import TOKENS, SequenceSample, Shards, shard
from realign.api.seeds import derive_seed
from realign.api.stats import Stats, keep_traces, merge_stats, on_host
from realign.engines.distributed.consistency import check_same_batch, check_same_weights
from realign.engines.distributed.divisions import check_elementwise
from realign.engines.distributed.pipeline_parallel import one_forward_one_backward
from realign.engines.distributed.sharded_network import ShardedNetwork
from realign.engines.distributed.sharded_state import ShardedSaver, ShardedState
from realign.engines.distributed.sharding import Sharding, check_reference
from realign.engines.training.engine_state import ModelSaver
from realign.engines.training.expert_load import StepLoad, counting, listening
from realign.engines.training.inference_engine import only_new_keys
from realign.engines.training.nonfinite import NAMED, Accumulated
from realign.engines.training.optimizer import OptimizerSpec
from realign.engines.training.stepper import Stepper
from realign.engines.training.transformers_engine import TransformersEngine, check_loss
from realign.engines.training.weights import check_weights, mix_into, named_weights, shapes_of
from realign.errors import ConfigError
from realign.functional import LMHead
from realign.models.files.unread import Unread
from realign.models.host import Host
from realign.models.network.network import Network
from realign.models.network.passes import Layout, ParallelPasses, Passes
from realign.models.network.settings import NetworkSettings
from realign.models.network.value_head import ValueNetwork
from realign.models.parts import is_part, part_of
from realign.ranks import current
from realign.samplers.in_process.generate import PROMPTS
from realign.samplers.in_process.rollout_model import product_dtype

_NO_ROWS = Layout.plain(Lengths.of([[0]]))
"""Layout of a pass without tokens of this rank."""


class ShardedEngine(TransformersEngine):
    """Implements `realign.api.PipelinableEngine` on all ranks of torch's default process group (FSDP2).

    Results do not depend on the number of ranks. A batch is split by prompt, balanced by tokens. A loss is divided by
    the weight of the whole batch. Metrics are merged before they are returned. `max_tokens_per_microbatch` applies
    per rank.
    """

    network: ShardedNetwork

    def __init__(
        self,
        name: str,
        module: Any,
        tokenizer: Any,
        settings: NetworkSettings | None = None,
        *,
        sharding: Sharding,
        value_head: ValueNetwork | None = None,
        **further: Any,
    ) -> None:
        """Shard a model; other arguments as in `TransformersEngine`.

        Every rank has the same weights, or has left them unread in the same folder.

        Raises:
            ConfigError: the model family cannot run packed or sharded, or a setting is incompatible with sharding.
            DataError: the ranks have loaded different weights.
        """
        self.sharding = sharding
        self._ranks = current()
        device = next(module.parameters()).device
        if sharding.offload and device.type == "cpu":
            raise ConfigError(f"models.{name}.sharding.offload=true: the model is already on the CPU. Remove this key.")
        given = named_weights(module, value_head)
        # Unread weights are compared slice by slice when they are read, see `check_same_slices`.
        check_same_weights(name, self._ranks, {k: x for k, x in given.items() if not isinstance(x, Unread)})
        # every pass is a collective: passes cannot run concurrently
        settings = replace(settings or NetworkSettings(), parallel_passes=ParallelPasses.off, divided=True)
        super().__init__(name, module, tokenizer, settings, value_head=value_head, **further)
        if self.fusion is not None:
            self.fusion.lender = self.network.weights
        self._sharded_state = ShardedState(self.network, self._stepper, self._average)

    @override
    def _network(
        self, name: str, module: Any, settings: NetworkSettings, value_head: ValueNetwork | None, probed: Any
    ) -> Network:
        return ShardedNetwork(name, module, settings, value_head, self.sharding, probed, self.host)

    def _make_stepper(self, spec: OptimizerSpec) -> Stepper:
        return ShardedStepper(self.name, spec, self.network, self.host)

    def _make_saver(self) -> ModelSaver:
        return ShardedSaver(self.name, self.network, self.tokenizer, self._average, self._ranks)

    @override
    def capabilities(self) -> EngineCapabilities:
        # A head of a sharded engine is a copy, which doesn't follow the optimizer.
        return replace(super().capabilities(), live_head=False)

    @property
    @override
    def data_ranks(self) -> int:
        return self.network.mesh.data_ranks

    @property
    @override
    def data_rank(self) -> int:
        """Index of this rank's part. All ranks of a tensor-parallel group have the same index."""
        return self.network.mesh.data_rank

    @override
    def lm_head(self) -> LMHead:
        """Return a full copy on every rank; collective."""
        return copy_head(self.forward)

    @override
    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        parts = self._cut("forward", data, TOKENS)
        return self._restore(parts, self.forward_part(parts[self.data_rank], mb_spec, post_hook))

    def forward_part(self, part: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        """Run `forward` on the prompts of this rank; without prompts, return a sample without keys."""
        return self._forward_part(part, mb_spec, post_hook, self.network.run)

    @override
    def reference(self, layers: int | None = None) -> Forward:
        """Compute the reference of a model with LoRA, on all ranks; see `reference_part`."""
        own = self.reference_part(layers)

        def forward(data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
            parts = self._cut("reference", data, TOKENS)
            return self._restore(parts, own(parts[self.data_rank], mb_spec, post_hook))

        return forward

    @override
    def reference_part(self, layers: int | None = None) -> Forward:
        """Compute the reference of a model with LoRA for the prompts of this rank.

        Raises:
            ConfigError: the model has no adapters.
        """
        check_reference(self.name, self.network.trains)
        return partial(self._forward_part, run=self.network.reference(layers))

    @property
    def _has_results(self) -> bool:
        """Whether this rank computes results: in a pipeline, those of the last stage do."""
        return self.network.stage is None or self.network.stage.last

    @torch.no_grad()
    def _forward_part(self, part: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook, run: Any) -> Any:
        passes = self.network.passes(part, mb_spec)
        idle, results = self._idle_rounds(passes), []
        try:
            for here, layout in passes:
                moved = here.to(self.device)
                output = run(here, moved, layout)
                if self._has_results:
                    results.append(only_new_keys(post_hook(output, moved), moved))
            for _ in idle:
                self.network.idle()
        finally:
            self.network.rest()
        # Only now: a rank without prompts or results has taken part in the passes of the others.
        if not len(part) or not self._has_results:
            return SequenceSample(())
        return self._restore_to(part[TOKENS].device, passes, results)

    @override
    def _own_part(self, method: str, data: SequenceSample) -> SequenceSample:
        return self._cut(method, data, TOKENS)[self.data_rank]

    @override
    def _over_ranks(self, stats: Stats) -> Stats:
        return merge_stats(self.network.mesh.gather(on_host(stats)))

    @override
    def measure(self, data: SequenceSample, mb_spec: MicroBatchSpec, loss_fn: LossFn) -> Stats:
        return self._over_ranks(run_loss(self.forward_part, self._own_part("measure", data), mb_spec, loss_fn))

    @override
    def accumulate(self, part: SequenceSample, mb_spec: MicroBatchSpec, loss_fn: LossFn, weight: Tensor) -> Stats:
        """Run on this rank's part; the gradient is the sum over all parts."""
        self._require_stepper()
        self.network.gradients.forget()
        passes = self.network.passes(part, mb_spec, training=True)
        idle = self._idle_rounds(passes)
        load = self._start_load(passes, idle)
        losses: list[Tensor] = []
        metrics: list[Any] = []
        # Other ranks gather layers and reduce gradients in the idle rounds, and wait for this rank in each of them.
        rounds: list[tuple[SequenceSample, Layout] | None] = [*passes, *(None for _ in idle)]
        todo = iter(rounds)
        started: deque[tuple[Layout, Tensor, Tensor | None]] = deque()
        done = 0

        def compute() -> tuple[Layout, Tensor, Tensor | None]:
            """Run the next pass. Return its layout, its hidden states and the loss to differentiate."""
            if (micro_batch := next(todo)) is None:
                with counting(load, _NO_ROWS):
                    return _NO_ROWS, self.network.idle(training=True), None
            here, layout = micro_batch
            moved = here.to(self.device)
            with counting(load, layout):
                output = self.network.run(here, moved, layout, training=True)
            if not self._has_results:
                return layout, output.hidden_RH, None
            loss, stats = loss_fn(output, moved)
            check_loss(loss)
            losses.append(loss.detach().float())
            metrics.append(keep_traces(stats, moved, mb_spec))
            return layout, output.hidden_RH, loss / weight

        with self._training(), listening(load):
            for forward in one_forward_one_backward(len(rounds), self.network.later_stages):
                if forward:
                    started.append(compute())
                    continue
                done += 1
                self.network.gradients.reduce(not self.sharding.reduce_once or done == len(rounds))
                layout, hidden_RH, loss = started.popleft()
                if load is not None:
                    load.weigh(layout)  # layers that are recomputed for the gradient
                self.network.gradients.differentiate(hidden_RH, loss)
        self.network.gradients.take()
        self._accumulated = Accumulated(passes, losses, loss_fn)
        return merge_stats(metrics) | self._counts(part, passes) | self._load_metrics(load) | self._replay_metrics()

    def _start_load(self, passes: Passes, idle: range) -> StepLoad | None:
        @torch.no_grad()
        def count(load: StepLoad) -> None:
            try:
                self._count_load(load, passes)
                for _ in idle:
                    with counting(load, _NO_ROWS):
                        self.network.idle()
            finally:
                self.network.rest()

        mesh = self.network.mesh
        ranks = mesh.data_ranks * (1 if mesh.context is None else mesh.context.size())
        return self._balancer.start(ranks * (len(passes.batches) + len(idle)), count, self._sum_ranks)

    @override
    def _sum_ranks(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks that compute different tokens or layers."""
        mesh = self.network.mesh
        for ranks in (mesh.data, mesh.context, mesh.pipeline):
            x = x if ranks is None else mesh.sum(x, ranks)
        return x

    @override
    def _replay_metrics(self) -> Stats:
        own, context = super()._replay_metrics(), self.network.mesh.context
        # Routers see the rows of this rank only, unlike losses.
        return own if context is None else merge_stats(self.host.gather(on_host(own), context.get_group()))

    @override
    def apply(self, weight: Tensor, *, vetoed: bool = False) -> Stats:
        stats = super().apply(weight, vetoed=vetoed)
        self.network.weights.gathered.outdate()
        return stats

    def _idle_rounds(self, passes: Passes) -> range:
        """Return the number of passes, as a range, that other ranks run after this rank has no micro-batch left.

        The ranks must agree on it before the first pass. All ranks gather layers together, so all must run the same
        number of passes.
        """
        own = len(passes.batches)
        return range(self.host.most(own) - own)

    def _total_loss(self, losses: Sequence[Tensor]) -> Tensor:
        # Over ranks with different prompts only: those that divide tokens or weights have the same loss, and only the
        # last stage of a pipeline has one.
        mesh = self.network.mesh
        total = mesh.sum(super()._total_loss(losses), mesh.data)
        return total if mesh.pipeline is None else mesh.sum(total, mesh.pipeline)

    def _nonfinite_origin(self, done: Accumulated, weight: Tensor) -> str:
        """Name the prompts in micro-batches with a non-finite loss.

        A non-finite gradient is not traced to prompts, since that would need extra passes on all ranks.
        """
        if (name := self.network.nonfinite_weight()) is not None:
            return f"the model: weight {name!r} is not finite"
        pairs = zip(done.passes, done.losses, strict=True) if self._has_results else ()
        own = [i for (part, _), loss in pairs if not bool(loss.isfinite()) for i in part.ids]
        culprits = dict.fromkeys(i for ids in self.network.mesh.gather(own) for i in ids)
        if not culprits:
            return "the sum of the gradients, while all losses are finite"
        return f"the loss of micro-batches with ids {', '.join(map(repr, list(culprits)[:NAMED]))}"

    @override
    def dropout_seed(self) -> int:
        """Return a different seed on each rank with different tokens or layers."""
        # Ranks that split layers must draw the same masks for a batch, and they have the same `data_rank`.
        steps, mesh = self._require_stepper().optimizer_steps, self.network.mesh
        place = [self.data_rank, *(of.get_local_rank() for of in (mesh.context, mesh.pipeline) if of is not None)]
        return derive_seed(self._seed, self.name, "dropout", steps, *place)

    @override
    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        parts = self._cut("generate", data, PROMPTS)
        return self._restore(parts, self.generate_part(parts[self.data_rank], config, seed=seed))

    def generate_part(self, part: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """Run `generate` for the prompts of this rank, with a full copy of the weights.

        Ranks that divide the tokens or the layers of a micro-batch have the same prompts, and divide them here. Without
        prompts, it returns a sample without keys.
        """
        mesh = self.network.mesh
        together = [ranks for ranks in (mesh.pipeline, mesh.context) if ranks is not None]

        def generate(prompts: SequenceSample, over: Sequence[DeviceMesh]) -> SequenceSample:
            if not over or not len(prompts):
                return self._generate_own(prompts, config, seed=seed)
            ranks, *others = over
            shares = shard(prompts, ranks.size(), PROMPTS)
            own = generate(shares[ranks.get_local_rank()], others)
            return shares.restore(self.host.gather(own, ranks.get_group()))

        try:
            return generate(part, together)
        finally:
            if not self.sharding.keeps_rollout:
                self._free_copy()

    def _free_copy(self) -> None:
        """Free the copy of the weights for rollouts."""
        self.network.weights.gathered.empty()
        if self.fusion is not None:
            self.fusion.forget()

    def _generate_own(self, prompts: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        if not len(prompts):
            # Gathering the weights is a collective, so a rank without prompts takes part too.
            self._rollout_module()
            return SequenceSample(())
        return super().generate(prompts, config, seed=seed)

    def _rollout_module(self) -> Any:
        with self.network.autocast():
            dtype = product_dtype(self.device)
        return self.network.weights.sampler(self.fusion, dtype)

    def _cut(self, method: str, data: SequenceSample, key: str) -> Shards:
        """Split the batch into the parts of the ranks; see `check_same_batch` for errors."""
        check_same_batch(self.name, self._ranks, method, data)
        return shard(data, self.data_ranks, key)

    def _restore(self, parts: Shards, own: SequenceSample) -> SequenceSample:
        return parts.restore(self.network.mesh.gather(own))

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state with this rank's shards (`DTensor`), never with full tensors."""
        return self._sharded_state.wrap(super().state_dict())

    @override
    def load_state_dict(self, state: Mapping[str, Any], *, weights_only: bool = False) -> None:
        """Restore a state that any number of ranks saved.

        Tensors may be full tensors, or `Saved` references to files, from which each rank reads only its shard.
        """
        if state["fused"] and self.fusion is not None:
            self.fusion.compare()  # with the run's initial weights, which `own_shards` replaces
        super().load_state_dict(self._sharded_state.own_shards(state), weights_only=weights_only)
        self.network.weights.gathered.outdate()
        if not self.sharding.keeps_rollout:
            self._free_copy()

    @override
    def weights(self) -> dict[str, Tensor]:
        """Return full tensors on every rank."""
        return self.network.weights.full_weights()

    @override
    def shards(self) -> dict[str, Tensor]:
        """Return the weights of the model without its value head as this rank sees them; not a collective."""
        return self.network.weights.shards()

    @override
    def load_weights(self, weights: Mapping[str, Tensor], mix: float = 1.0) -> None:
        own = named_weights(self.module, self.value_head)
        check_weights(self.name, self.network.weights.shapes(), shapes_of(weights), mix)
        # In place on the local slices: the optimizer holds the same memory.
        slices = {name: x.to_local() if is_part(x) else x for name, x in own.items()}
        mix_into(slices, {name: _slice(weights[name], x) for name, x in own.items()}, mix)
        self.network.weights.gathered.outdate()


def _slice(x: Tensor, like: Any) -> Tensor:
    return part_of(x, like) if is_part(like) else x


class ShardedStepper(Stepper):
    """A stepper over the shards of one rank. The gradient norm is taken over all ranks."""

    def __init__(self, name: str, spec: OptimizerSpec, network: ShardedNetwork, host: Host) -> None:
        check_elementwise(name, spec)
        network.check_trained()
        super().__init__(name, spec, network.own_parameters(), host=host)
        self._network = network

    def gradient_norm(self) -> Tensor:
        """Return the norm of the whole gradient."""
        return self._network.gradients.norm()

"""`ShardedEngine`: runs and trains one transformers model in several processes that divide weights and batches.

Every rank calls every method, with the same whole batch; it computes the prompts that are its part, and returns what
one process would. The methods whose names end in `_part`, and `accumulate`, are given the part itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realign.api.microbatch import MicroBatchSpec
from realign.api.model import Forward, GenerationConfig, LossFn, LossWeightFn, PostHook, StepIf, derive_seed
from realign.api.sample import TOKENS, SequenceSample
from realign.api.shards import Shards, shard
from realign.api.stats import Stats, merge_stats
from realign.api.trace import keep_traces, with_responses
from realign.engines.distributed.consistency import facts_of
from realign.engines.distributed.fsdp import ShardedNetwork
from realign.engines.distributed.ranks import current
from realign.engines.distributed.shards import Saved, from_slice, is_part, part_of, read_parts, whole
from realign.engines.distributed.spec import Sharding
from realign.engines.files.folders import AVERAGED, save_folder
from realign.engines.files.weights import check_weights, mix_into, named_weights, shapes_of
from realign.engines.network.cpu_lanes import ParallelPasses
from realign.engines.network.network import Network, check_finite, write_network
from realign.engines.network.shared_prefix import Passes
from realign.engines.sampling.rollout import PROMPTS
from realign.engines.sampling.weight_fusion import Fusion
from realign.engines.training.engine import Accumulated, TransformersEngine, added, check_loss
from realign.engines.training.optimizer import OptimizerSpec
from realign.engines.training.stepper import Stepper, step_weight


class ShardedEngine(TransformersEngine):
    """Implements `realign.api.PipelinableEngine` on all ranks of torch's default process group (FSDP2).

    Results do not depend on the number of ranks: a batch is cut by prompt, balanced by tokens; a loss is divided by the
    weight of the whole batch; metrics are merged before anybody sees them. `max_tokens_per_microbatch` is of each rank.
    """

    network: ShardedNetwork

    def __init__(self, name: str, module: Any, tokenizer: Any, *, sharding: Sharding, **settings: Any) -> None:
        """Keep a slice of a model that every rank has loaded alike; other arguments as in `TransformersEngine`.

        Raises:
            ValueError: the model family cannot run packed or sharded, or a setting does not go with it.
        """
        self.sharding = sharding
        self._ranks = current()
        device = next(module.parameters()).device
        if sharding.offload and device.type == "cpu":
            raise ValueError(f"models.{name}.sharding.offload moves weights off an accelerator; this model is on a CPU")
        settings["parallel_passes"] = ParallelPasses.off  # ranks meet in every pass: it cannot run beside another
        super().__init__(name, module, tokenizer, **settings)

    def _network(self, name: str, module: Any, **settings: Any) -> Network:
        return ShardedNetwork(name, module, sharding=self.sharding, **settings)

    def _make_stepper(self, name: str, spec: OptimizerSpec) -> Stepper:
        return _ShardedStepper(name, spec, self.network)

    @property
    def data_ranks(self) -> int:
        """Parts into which a batch is cut."""
        return self.network.grid.data_ranks

    @property
    def data_rank(self) -> int:
        """Which of them is this rank's; ranks of one tensor-parallel group have the same."""
        return self.network.grid.data_rank

    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        """See `TransformersEngine.forward`."""
        parts = self._cut("forward", data, TOKENS)
        return self._restored(parts, self.forward_part(parts[self.data_rank], mb_spec, post_hook))

    def forward_part(self, part: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        """`forward` on the prompts of this rank; of no prompts, a sample without keys."""
        return self._forward_part(part, mb_spec, post_hook, self.network.run)

    def reference(self, layers: int | None = None) -> Forward:
        """See `TransformersEngine.reference`; of a model with LoRA only.

        Raises:
            ValueError: the model has no adapters.
        """
        if not self.network.trains.only_adds:
            raise ValueError(
                f"model {self.name!r} is sharded: branch=reference needs trains=lora, since a frozen copy of top "
                "layers is not sharded with them; give the reference a model of its own"
            )
        run = self.network.reference(layers)

        def forward(data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
            parts = self._cut("reference", data, TOKENS)
            return self._restored(parts, self._forward_part(parts[self.data_rank], mb_spec, post_hook, run))

        return forward

    @torch.no_grad()
    def _forward_part(self, part: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook, run: Any) -> Any:
        passes = self.network.passes(part, mb_spec)
        idle, results = self._idle_rounds(passes), []
        try:
            for here, layout in passes:
                moved = here.to(self.device)
                results.append(added(post_hook(run(here, moved, layout), moved), moved))
            for _ in idle:
                self.network.idle()
        finally:
            self.network.rest()
        if not len(part):
            return SequenceSample(())
        return self._restored_to(part[TOKENS].device, passes, results)

    def train_batch(
        self,
        data: SequenceSample,
        mb_spec: MicroBatchSpec,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        step_if: StepIf | None = None,
    ) -> Stats:
        """See `TransformersEngine.train_batch`; `n_microbatches` is the mean over ranks."""
        parts = self._cut("train_batch", data, TOKENS)
        weight = step_weight(data, loss_weight_fn).to(self.device)
        if float(weight) == 0:
            return self.skip("zero_weight_steps")
        own = self.accumulate(parts[self.data_rank], mb_spec, loss_fn, weight)
        stats = merge_stats(_moved(found, self.device) for found in self.network.grid.gather(_moved(own, "cpu")))
        return {**stats, **self.apply(weight, vetoed=step_if is not None and not step_if(stats))}

    def accumulate(self, part: SequenceSample, mb_spec: MicroBatchSpec, loss_fn: LossFn, weight: Tensor) -> Stats:
        """See `TransformersEngine.accumulate`; of this rank's part, with the gradient of all parts."""
        self._trained()
        weight = weight.to(self.device)
        self.network.forget_gradients()
        passes = self.network.passes(with_responses(part, mb_spec), mb_spec, training=True)
        idle = self._idle_rounds(passes)
        losses: list[Tensor] = []
        metrics: list[Any] = []
        with self._training():
            for here, layout in passes:
                moved = here.to(self.device)
                output = self.network.run(here, moved, layout, training=True)
                loss, stats = loss_fn(output, moved)
                check_loss(loss)
                self.network.differentiate(output.hidden_RH, loss / weight)
                losses.append(loss.detach().float())
                metrics.append(keep_traces(stats, moved, mb_spec))
            for _ in idle:
                self.network.differentiate(self.network.idle(training=True), None)
        self.network.take_gradients()
        self._accumulated = Accumulated(passes, losses, loss_fn)
        return merge_stats(metrics) | self._counts(part, passes)

    def apply(self, weight: Tensor, *, vetoed: bool = False) -> Stats:
        """See `TransformersEngine.apply`."""
        stats = super().apply(weight, vetoed=vetoed)
        self.network.gathered.outdate()
        return stats

    def _idle_rounds(self, passes: Passes) -> range:
        """Passes that others will make and this rank has no micro-batch for; to be agreed on before the first pass.

        Layers are gathered by all ranks together, so that all must make as many passes.
        """
        own = len(passes.batches)
        return range(self.network.grid.most(own) - own)

    def _total_loss(self, losses: Sequence[Tensor]) -> Tensor:
        return self.network.grid.sum(super()._total_loss(losses))

    def _nonfinite_origin(self, done: Accumulated, weight: Tensor) -> str:
        """The prompts of micro-batches with such a loss; a gradient is not traced, which would take passes of all."""
        if (name := self._nonfinite_weight()) is not None:
            return f"the model itself: weight {name!r} is not finite"
        pairs = zip(done.passes, done.losses, strict=True)
        own = [i for (part, _), loss in pairs if not bool(loss.isfinite()) for i in part.ids]
        found = dict.fromkeys(i for ids in self.network.grid.gather(own) for i in ids)
        if not found:
            return "no loss: the sum of the gradients alone is not finite"
        return f"the loss of micro-batches with ids {', '.join(map(repr, list(found)[:8]))}"

    def _nonfinite_weight(self) -> str | None:
        own = (name for name, p in self.network.sharded.items() if not bool(p.to_local().isfinite().all()))
        return self._ranks.first(next(own, None))

    def dropout_seed(self) -> int:
        """See `TransformersEngine.dropout_seed`; of each part of a batch another."""
        steps = self._trained().optimizer_steps
        return derive_seed(self._seed, self.name, "dropout", steps, self.data_rank)

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """See `TransformersEngine.generate`."""
        parts = self._cut("generate", data, PROMPTS)
        return self._restored(parts, self.generate_part(parts[self.data_rank], config, seed=seed))

    def generate_part(self, part: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """`generate` for the prompts of this rank, with a whole copy of the weights; of none, a sample without keys."""
        try:
            if not len(part):
                self._sampler()
                return SequenceSample(())
            return super().generate(part, config, seed=seed)
        finally:
            if not self.sharding.keep_rollout:
                self.network.gathered.empty()

    def _sampler(self) -> tuple[Any, Fusion | None]:
        return self.network.sampler(), self.network.fusion

    def _cut(self, method: str, data: SequenceSample, key: str) -> Shards:
        """The parts of the ranks; refuses a batch that is not the same on all of them, for which they would wait.

        Raises:
            ValueError: names a rank that differs, and how.
        """
        found = self._ranks.gather(facts_of(method, data))
        for rank, facts in enumerate(found):
            if differing := found[0].difference(facts):
                raise ValueError(
                    f"model {self.name!r}: rank {rank} was given another batch than rank 0, or another call than "
                    f"{method} ({differing}); interfaces, rewards and data must give every rank the same"
                )
        return shard(data, self.data_ranks, key)

    def _restored(self, parts: Shards, own: SequenceSample) -> SequenceSample:
        return parts.restore(self.network.grid.gather(own))

    def save(self, path: Path) -> None:
        """See `TransformersEngine.save`; rank 0 gathers the weights on the host and writes.

        Raises:
            ValueError: a weight is not finite.
            OSError: rank 0 could not write.
        """
        path = Path(path)
        self._save(path)
        if self._average is not None:
            with self._average.in_place():
                self._save(path.with_name(f"{path.name}{AVERAGED}"))

    def _save(self, path: Path) -> None:
        gathered = self.network.gather(torch.device("cpu") if self._ranks.leader else None)

        def fill(folder: Path) -> None:
            write_network(folder, gathered.module, gathered.value_head, self.network.trains)
            self.tokenizer.save_pretrained(folder)

        def write() -> None:
            check_finite(self.name, gathered.module, gathered.value_head)
            save_folder(path, fill)

        try:
            self._ranks.lead(write)
        finally:
            self.network.gathered.empty()

    def state_dict(self) -> dict[str, Any]:
        """See `TransformersEngine.state_dict`. Tensors are this rank's parts (`DTensor`), whole in no place."""
        state = super().state_dict()
        if self._stepper is not None:
            moments = state["optimizer"]["optimizer"]["state"]
            places = self._places()
            state["optimizer"]["optimizer"]["state"] = {
                i: {name: self._as_part(x, places[i]) for name, x in kept.items()} for i, kept in moments.items()
            }
        if self._average is not None:
            trained = [i for i, p in enumerate(self.network.owned()) if p.requires_grad]
            average = state["ema"]["average"]
            state["ema"] = {"average": [self.network.like(x, i) for x, i in zip(average, trained, strict=True)]}
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, weights_only: bool = False) -> None:
        """See `TransformersEngine.load_state_dict`; of any number of ranks.

        Tensors may be whole, or `Saved` in files, of which only this rank's part is read.
        """
        if state.get("fused") and self.network.fusion is not None:
            self.network.sampler()  # with the weights that the run began with, see `Fusion.compare`
        reader = _Reader()
        state = self._own_parts(state, reader)
        reader.read()
        super().load_state_dict(state, weights_only=weights_only)
        self.network.gathered.outdate()
        if not self.sharding.keep_rollout:
            self.network.gathered.empty()

    def _places(self) -> dict[int, int]:
        """From the number that the optimizer's state has for a parameter to its place among those of the network."""
        at = {id(p): place for place, p in enumerate(self.network.owned())}
        groups = self._trained().optimizer.param_groups
        return dict(enumerate(at[id(p)] for group in groups for p in group["params"]))

    def _as_part(self, x: Tensor, place: int) -> Tensor:
        return x if x.ndim == 0 else self.network.like(x, place)

    def _own_parts(self, state: Mapping[str, Any], reader: _Reader) -> dict[str, Any]:
        """The state with this rank's slices in place of tensors: of weights as `DTensor`, of moments plain."""
        own = dict(state)
        for name, network in (("module", self.module), ("value_head", self.value_head)):
            if network is not None and state[name] is not None:
                now = network.state_dict()
                own[name] = {k: reader.part(x, now[k]) if k in now else x for k, x in state[name].items()}
        slices = list(self.network.sharded.values())
        if self._stepper is not None and state["optimizer"] is not None:
            kept, places = state["optimizer"]["optimizer"], self._places()
            moments = {
                i: {k: reader.plain(x, slices[places[i]]) for k, x in moment.items()}
                for i, moment in kept["state"].items()
                if i in places
            }
            own["optimizer"] = {**state["optimizer"], "optimizer": {**kept, "state": moments}}
        if self._average is not None and state["ema"] is not None:
            trained = [p for p in slices if p.requires_grad]
            average = zip(state["ema"]["average"], trained, strict=True)
            own["ema"] = {"average": [reader.plain(x, p) for x, p in average]}
        return own

    def weights(self) -> dict[str, Tensor]:
        """See `TransformersEngine.weights`: whole, on every rank."""
        return {name: whole(x) for name, x in named_weights(self.module, self.value_head).items()}

    def load_weights(self, weights: Mapping[str, Tensor], mix: float = 1.0) -> None:
        """See `TransformersEngine.load_weights`."""
        own = named_weights(self.module, self.value_head)
        check_weights(self.name, shapes_of(own), shapes_of(weights), mix)
        slices = {name: x.to_local() if is_part(x) else x for name, x in own.items()}
        mix_into(slices, {name: _slice(weights[name], x) for name, x in own.items()}, mix)
        self.network.gathered.outdate()


class _ShardedStepper(Stepper):
    """A stepper over the slices of one rank; the norm of a gradient is that of all ranks."""

    def __init__(self, name: str, spec: OptimizerSpec, network: ShardedNetwork) -> None:
        super().__init__(name, spec, network.owned())
        self._network = network

    def gradient_norm(self) -> Tensor:
        """Of the whole gradient."""
        return self._network.gradient_norm()


class _Reader:
    """Collects what is to be read from the files of several ranks, so that each file is opened once."""

    def __init__(self) -> None:
        self._wanted: dict[Path, dict[str, Any]] = {}

    def part(self, x: Tensor | Saved, like: Tensor) -> Tensor:
        """The same tensor cut as `like` is; of one in files, filled by `read`."""
        if not isinstance(x, Saved):
            if x.shape != like.shape:
                raise ValueError(f"a saved tensor has shape {list(x.shape)}, and this model's {list(like.shape)}")
            return from_slice(part_of(x, like), like) if is_part(like) else x
        wanted = self._wanted.setdefault(x.folder, {})
        if x.name not in wanted:
            wanted[x.name] = torch.empty_like(like)
        found: Tensor = wanted[x.name]
        return found

    def plain(self, x: Tensor | Saved, like: Any) -> Tensor:
        """This rank's slice of the tensor, cut as `like` is."""
        if not isinstance(x, Saved) and x.ndim == 0:
            return x
        part: Any = self.part(x, like)
        slice_: Tensor = part.to_local()
        # of a whole: dense, as fused optimizers read moments, and without what the other ranks have
        return slice_ if isinstance(x, Saved) else slice_.clone(memory_format=torch.contiguous_format)

    def read(self) -> None:
        """Fill what was asked for."""
        for folder, wanted in self._wanted.items():
            read_parts(folder, wanted)


def _slice(x: Tensor, like: Any) -> Tensor:
    return part_of(x, like) if is_part(like) else x


def _moved(stats: Stats, device: torch.device | str) -> Stats:
    """The same metrics on another device: on the host they can go to another process."""
    return {name: type(stat)(*(x.to(device) for x in stat)) for name, stat in stats.items()}

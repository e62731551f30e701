"""`Host`: the models of one rank of a worker group and the operations on them. This module does not depend on Ray."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realign.api import GenerationConfig, MicroBatchSpec, Model, SequenceSample, Stats
from realign.api.engine import (
    EngineCapabilities,
    LossFn,
    LossWeightFn,
    PipelinableEngine,
    PostHook,
    StepIf,
    StepsInHalves,
    run_loss,
)
from realign.api.model import ModelSpec
from realign.api.sampler import Request, Sampler
from realign.api.sampling_mask import SamplingMask
from realign.errors import ConfigError
from realign.functional import LMHead
from realign.models.parts import whole
from realign.runtime.models import load_own
from realign.runtime.ray.wire_format import map_tree

WHOLE = frozenset({"state_dict", "fixed_weights", "weights"})
"""Methods whose large result is the same on all ranks, so that only rank 0 returns it."""


@dataclass(frozen=True)
class Loaded:
    """Facts about a loaded model that a worker reports to the driver."""

    capabilities: EngineCapabilities
    data_ranks: int
    """Number of shards of a batch."""
    data_rank: int
    """Index of the shard that this rank receives. Model-parallel ranks of one replica receive the same shard."""
    steps_in_halves: bool
    """Whether its engine is a `StepsInHalves`."""
    tokenizer: Any
    saved: Mapping[str, Any]
    saved_views: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class _Received:
    """Weights that another process sent. Implements `WeightSource`."""

    received: Mapping[str, Tensor]

    def weights(self) -> Mapping[str, Tensor]:
        """See `WeightSource.weights`."""
        return self.received

    def save(self, path: Path) -> None:
        """Raise an error: config and tokenizer are in another process."""
        raise NotImplementedError("received weights cannot be saved, since config and tokenizer are in another process")


class Offload:
    """Moves tensors to the host and back in place, so existing references remain valid.

    No computation may use them between `leave` and `come_back`. On a CPU both methods do nothing.
    """

    def __init__(self, resident: Callable[[], Iterable[Tensor]]) -> None:
        """Set the function that lists the tensors to move, such as `PipelinableEngine.resident`."""
        self._resident = resident
        self._away: list[tuple[Tensor, torch.device]] = []

    def leave(self) -> None:
        """Move all tensors to the host."""
        # each tensor once, even if tied weights are listed twice: a second move would take the host for its device
        for x in {id(x): x for x in self._resident()}.values():
            if x.device.type != "cpu":
                self._away.append((x, x.device))
                host = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)  # torch caches pinned memory
                x.data = host.copy_(x.detach())

    def come_back(self) -> None:
        """Move the tensors back to their devices."""
        for x, device in self._away:
            x.data = x.detach().to(device, non_blocking=True)
        if any(device.type == "cuda" for _, device in self._away):
            torch.cuda.synchronize()  # the host memory may be reused after this
        self._away.clear()


class Host:
    """The models of a group on one of its ranks. Each method is a collective: all ranks call it at the same time.

    A method with a `part` parameter receives this rank's shard of the batch, and returns the results for that shard.
    """

    def __init__(self, rank: int, size: int) -> None:
        """Create the host of rank `rank` in a group of `size` ranks."""
        self._rank = rank
        self._size = size
        self._models: dict[str, Model] = {}
        self._references: dict[tuple[str, int | None], Callable[..., SequenceSample]] = {}
        self._away: dict[str, Offload] = {}
        self._samplers: dict[str, Sampler] = {}

    def load(self, specs: Mapping[str, ModelSpec], seed: int, offload: frozenset[str]) -> dict[str, Loaded]:
        """Load the models of these roles. Models of roles in `offload` stay in host memory until they are called."""
        loaded = {}
        for role, model in load_own(specs, seed).items():
            self._models[role] = model
            engine = self._engine(role)
            if role in offload:
                self._away[role] = Offload(engine.resident)
                try:
                    self._away[role].leave()
                except ValueError as error:
                    raise ConfigError(f"runtime.placement.{role}.offload=true: {error}. Remove it.") from error
            loaded[role] = Loaded(
                # no copy of the head follows training, and workers read no images
                replace(engine.capabilities(), live_head=False, images=False, size=""),
                engine.data_ranks,
                engine.data_rank,
                isinstance(engine, StepsInHalves),
                model.tokenizer,
                model.saved,
                model.saved_views,
            )
        return loaded

    def load_copies(self, specs: Mapping[str, ModelSpec], seed: int, recompute: bool) -> None:
        """Load copies of the models of these roles for concurrent sampling (rollout=async)."""
        for role, spec in specs.items():
            self._samplers[role] = spec.background_sampler(role, seed=seed, recompute=recompute)

    def sample(self, role: str, data: SequenceSample, config: GenerationConfig, seed: int) -> SequenceSample:
        """See `Sampler.generate`; callable from any thread."""
        return self._samplers[role].generate(data, config, seed=seed)

    def complete(
        self, role: str, id: Hashable, response_index: int, prompt_ids: Tensor, config: GenerationConfig, seed: int
    ) -> tuple[Tensor, Tensor, Tensor, bool, SamplingMask | None]:
        """See `Sampler.submit`; returns the fields of `Completion`."""
        done = self._samplers[role].submit(Request(id, response_index, prompt_ids, config, seed)).result()
        return done.ids, done.logprobs, done.versions, done.truncated, done.mask

    def update(self, role: str, weights: Mapping[str, Tensor], version: int) -> None:
        """See `Sampler.update`."""
        self._samplers[role].update(_Received(weights), version)

    def ask(self, role: str, verb: str, arguments: tuple[Any, ...]) -> Any:
        """Call the method `verb` for a role: of this class, otherwise of the role's sampler or engine.

        An offloaded model is loaded for the duration of the call.
        """
        with self._present(role, stays=verb in ("accumulate", "finite")):  # `apply` needs the gradient
            if hasattr(self, verb):
                return getattr(self, verb)(role, *arguments)
            return getattr(self._samplers.get(role) or self._engine(role), verb)(*arguments)

    @contextmanager
    def _present(self, role: str, *, stays: bool) -> Iterator[None]:
        away = self._away.get(role)
        if away is not None:
            away.come_back()
        try:
            yield
        finally:
            if away is not None and not stays:
                away.leave()

    def _engine(self, role: str) -> PipelinableEngine:
        return self._models[role].engine

    def _halves(self, role: str) -> StepsInHalves:
        engine = self._engine(role)
        assert isinstance(engine, StepsInHalves)  # the driver knows from `Loaded`
        return engine

    def forward(self, role: str, part: SequenceSample, mb_spec: MicroBatchSpec, hook: PostHook) -> SequenceSample:
        """See `PipelinableEngine.forward`."""
        return self._engine(role).forward_part(part, mb_spec, hook)

    def use_heads(self, role: str, heads: Mapping[str, tuple[Tensor, Tensor | None, float, float | None]]) -> None:
        """See `PipelinableEngine.use_heads`; the values are the fields of `LMHead`."""
        # tensors from the wire are read-only views of Ray's object store, which would have to keep them
        copies = map_tree(heads, Tensor.clone)
        self._engine(role).use_heads({other: LMHead(*fields) for other, fields in copies.items()})

    def reference(self, role: str, layers: int | None) -> None:
        """Store a copy of the current policy for `score`."""
        self._references[role, layers] = self._engine(role).reference_part(layers)

    def score(
        self, role: str, part: SequenceSample, mb_spec: MicroBatchSpec, hook: PostHook, layers: int | None
    ) -> SequenceSample:
        """Run `forward` with the policy that `reference` stored."""
        return self._references[role, layers](part, mb_spec, hook)

    def measure(self, role: str, part: SequenceSample, mb_spec: MicroBatchSpec, loss_fn: LossFn) -> Stats:
        """Return the loss and its metrics, without a gradient."""
        return run_loss(self._engine(role).forward_part, part, mb_spec, loss_fn)

    def generate(self, role: str, part: SequenceSample, config: GenerationConfig, seed: int) -> SequenceSample:
        """See `PipelinableEngine.generate`."""
        return self._engine(role).generate_part(part, config, seed=seed)

    def accumulate(
        self, role: str, part: SequenceSample, mb_spec: MicroBatchSpec, loss_fn: LossFn, weight: Tensor
    ) -> Stats:
        """Run the first half of a train step: accumulate the gradient, and return the metrics of this shard."""
        return self._halves(role).accumulate(part, mb_spec, loss_fn, weight)

    def apply(self, role: str, weight: Tensor, vetoed: bool) -> Stats:
        """Run the second half of a train step: the optimizer step. Return the metrics of the whole batch."""
        return self._halves(role).apply(weight, vetoed=vetoed)

    def train(
        self, role: str, part: SequenceSample, mb_spec: MicroBatchSpec, loss_fn: LossFn, weight: Tensor
    ) -> tuple[Stats, Stats]:
        """Run both halves of a train step."""
        return self.accumulate(role, part, mb_spec, loss_fn, weight), self.apply(role, weight, False)

    def train_batch(
        self,
        role: str,
        data: SequenceSample,
        mb_spec: MicroBatchSpec,
        functions: tuple[LossFn, LossWeightFn, StepIf | None],
    ) -> tuple[Stats, list[Stats]]:
        """Run a train step of an engine without halves. Return its metrics, and those that `step_if` received."""
        loss_fn, loss_weight_fn, step_if = functions
        received: list[Stats] = []

        def decide(stats: Stats) -> bool:
            received.append(stats)
            return step_if is None or step_if(stats)

        return self._engine(role).train_batch(data, mb_spec, loss_fn, loss_weight_fn, decide), received

    def skip(self, role: str, reason: str) -> Stats:
        """Count a skipped optimizer step."""
        return self._halves(role).skip(reason)

    def state_dict(self, role: str) -> Any:
        """See `PipelinableEngine.state_dict`."""
        return self._whole(self._engine(role).state_dict())

    def fixed_weights(self, role: str) -> Any:
        """See `PipelinableEngine.fixed_weights`."""
        return self._whole(self._engine(role).fixed_weights())

    def _whole(self, tree: Any) -> Any:
        """Gather the sharded tensors of a tree on rank 0, one after the other. Other ranks get empty tensors."""
        if self._size == 1:
            return tree

        def gather(x: Tensor) -> Tensor:
            full = whole(x)
            # one tensor at a time on the device, and only rank 0 keeps it, since only its answer is read (`WHOLE`)
            return full.cpu() if self._rank == 0 else full.new_empty(0)

        return map_tree(tree, gather)

    def load_state_dict(self, role: str, state: Mapping[str, Any], weights_only: bool) -> None:
        """See `PipelinableEngine.load_state_dict`."""
        if self._size == 1:  # the optimizer would keep moments in shared memory; sharded engines copy their slices
            state = map_tree(state, Tensor.clone)
        self._engine(role).load_state_dict(state, weights_only=weights_only)

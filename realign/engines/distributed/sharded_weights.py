"""`ShardedWeights`: the weights of a sharded network by name: as shards, in full, and as a copy for rollouts."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from realign.engines.distributed.mesh import Mesh
from realign.engines.distributed.pipeline_parallel import PartOfStage, first_rank
from realign.engines.training.weights import VALUE_HEAD, named_weights
from realign.models.host import Host
from realign.models.network.branches import read_stack
from realign.models.network.value_head import ValueNetwork
from realign.models.parts import from_slice, whole
from realign.samplers.in_process.compiled.fusion import Fusion


@dataclass(frozen=True)
class Placed:
    """A weight of the whole model, on whichever ranks it is."""

    like: Tensor
    """A tensor of its shape and dtype, without memory."""
    trained: bool
    """Whether it requires a gradient."""
    stages: Sequence[int]
    """The stages that have it: one, or for tied embeddings the first and the last."""


def place_on(p: Tensor, stages: Sequence[int]) -> Placed:
    """Return where a weight is that these stages have."""
    return Placed(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad, stages)


class ShardedWeights:
    """The weights of a network of which each rank has a slice. Methods that gather are collectives.

    Attributes:
        sharded: the slices by name, as `DTensor`s.
        placed: all weights of the model by name, on whichever ranks they are.
        names: name in `placed` of each weight, which may have another name if it is tied.
        gathered: the copy of the model for rollouts.
        own_parameters: the slices as plain tensors in the same memory, for optimizers that work element by element: an
            optimizer step on them is one on the network. A `DTensor` optimizer couldn't combine the weights of two
            meshes (ADR 15).
    """

    def __init__(
        self,
        network: Any,
        placed: Mapping[str, Placed],
        names: Mapping[str, str],
        gathered: GatheredCopy,
        mesh: Mesh,
    ) -> None:
        """Name the weights of a network whose modules are sharded by now; the arguments are attributes."""
        self._network, self._mesh = network, mesh
        self.placed, self.names, self.gathered = dict(placed), names, gathered
        self.host: Host = network.host
        self.device: torch.device = network.device
        self.sharded: dict[str, Any] = dict(network.named_parameters())
        self.own_parameters = [nn.Parameter(p.detach().to_local(), p.requires_grad) for p in self.sharded.values()]

    @property
    def first_rank(self) -> int:
        """The first rank of the stage of this rank."""
        ranks = self._mesh.pipeline
        return 0 if ranks is None else first_rank(ranks, ranks.get_local_rank())

    def set_trained(self, trained: bool) -> None:
        """Set for all weights whether they train."""
        self.placed = {name: replace(placed, trained=trained) for name, placed in self.placed.items()}

    def like(self, own: Tensor, place: int) -> DTensor:
        """Wrap a tensor shaped like this rank's slice of `own_parameters[place]` as a shard of the full tensor."""
        return from_slice(own, list(self.sharded.values())[place])

    def part(self, name: str, own: DTensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor that is divided as a weight is, such as its moments, as this rank sees it.

        Args:
            name: name of the weight in `placed`.
            own: this rank's shard; None if the weight is on other stages.
            dtype: dtype of the tensor; None means that of the weight.
        """
        if self._mesh.pipeline is None:
            assert own is not None
            return own
        placed, stage = self.placed[name], self._mesh.pipeline.get_local_rank()
        shard = own if stage == placed.stages[0] else None
        return PartOfStage.of(placed.like.to(dtype), shard, placed.stages[0], self._mesh.pipeline)

    def weight(self, name: str) -> Tensor:
        """Return a weight as this rank sees it; `whole` gathers it."""
        own: Any = self.sharded.get(name)
        return self.part(name, None if own is None else own.detach())

    def full(self, name: str) -> Tensor:
        """Return a full weight on the device of every rank; collective."""
        return whole(self.weight(name))

    def base_weights(self) -> dict[str, Tensor]:
        """Return tensors like the weights that a saved folder has, without those of adapters, and the buffers.

        They are equal objects for tied weights. Only buffers have values.
        """
        copy, buffers = self.gathered, dict(self._network.named_buffers())
        likes: dict[int, Tensor] = {id(p): self.placed[name].like for name, p in copy.named_parameters()}
        likes |= {id(x): buffers[name] for name, x in copy.named_buffers()}
        return {name: likes[id(x)] for name, x in self._network.trains.base_weights(copy.module).items()}

    def saves(self, x: Tensor) -> bool:
        """Return whether the stage of this rank writes a weight into saved folders; tied embeddings are on two."""
        name = next((name for name, p in self.sharded.items() if p is x), None)
        stages = self._mesh.pipeline
        return name is None or stages is None or self.placed[name].stages[0] == stages.get_local_rank()

    def full_weights(self) -> dict[str, Tensor]:
        """Return all weights in full, and the buffers, by the names of `named_weights`; collective."""
        own = named_weights(self._network.module, self._network.value_head)
        return {name: own[name] if of is None else self.full(of) for name, of in self._all_names()}

    def shards(self) -> dict[str, Tensor]:
        """Return all weights and buffers of the model as this rank sees them, by the names of `named_weights`."""
        own = named_weights(self._network.module, None)
        return {
            name: own[name] if of is None else self.weight(of)
            for name, of in self._all_names()
            if not name.startswith(VALUE_HEAD)
        }

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of all weights and buffers, by the names of `named_weights`."""
        own = named_weights(self._network.module, self._network.value_head)
        return {name: own[name].shape if of is None else self.placed[of].like.shape for name, of in self._all_names()}

    def _all_names(self) -> list[tuple[str, str | None]]:
        """Return all names of `named_weights`, each with the name in `placed`; None for a buffer."""
        names = named_weights(self.gathered.module, self.gathered.value_head)
        return [(name, self.names.get(name if name.startswith(VALUE_HEAD) else f"module.{name}")) for name in names]

    def gather(self, device: torch.device | None, names: Collection[str] | None = None) -> GatheredCopy:
        """Gather the weights with these names, or all, on `device`. With None, the rank only participates."""
        wanted = ((name, self.full(name)) for name in self.placed if names is None or name in names)
        self.gathered.fill(wanted, dict(self._network.named_buffers()), device)
        return self.gathered

    def sampler(self, fusion: Fusion | None, dtype: torch.dtype) -> Any:
        """Return the model with the current weights on this rank's device, for rollouts.

        Where `fusion` joins the layers, it has copies of their weights, and those of the model stay empty.
        """
        if not self.gathered.current:
            if fusion is None or not fusion.join(self, dtype):
                self.gather(self.device)
            self.gathered.current = True
        return self.gathered.module

    def on_all_ranks(self, own: bool) -> bool:
        """See `WeightGatherer`."""
        return not self.host.most(int(not own))

    def gather_embeddings_and_heads(self) -> None:
        """See `WeightGatherer`."""
        layers = set(self.gathered.names(read_stack(self.gathered.module).layers))
        self.gather(self.device, self.placed.keys() - layers)

    @contextmanager
    def gather_layer(self, layer: nn.Module) -> Iterator[None]:
        """See `WeightGatherer`."""
        names = self.gathered.names(layer)
        self.gather(self.device, names)
        try:
            yield
        finally:
            self.gathered.empty(names)


class GatheredCopy:
    """Unsharded modules of the same classes as a sharded network. They are empty until weights are gathered.

    Attributes:
        module: a transformers model.
        value_head: its separate value network, or None.
        current: whether rollouts with it have the current weights.
    """

    def __init__(self, module: Any, value_head: ValueNetwork | None) -> None:
        """Copy the modules without their weights. The modules must not be sharded yet."""
        parts = {"module": module} if value_head is None else {"module": module, "value_head": value_head}
        self._device = next(module.parameters()).device
        memo: dict[int, Any] = {}
        for part in parts.values():
            for p in part.parameters():
                nothing = _without_memory(p.shape, p.dtype, self._device)
                memo.setdefault(id(p), nn.Parameter(nothing, requires_grad=False))
        # `deepcopy` takes the empty parameters of `memo` instead of copying the weights, and keeps tied ones tied.
        parts = copy.deepcopy(parts, memo)
        self.module: Any = parts["module"]
        self.value_head: ValueNetwork | None = parts.get("value_head")
        self._all = nn.ModuleDict(parts)
        self.named_parameters, self.named_buffers = self._all.named_parameters, self._all.named_buffers
        self.current = False

    def names(self, part: nn.Module) -> list[str]:
        """Return the names of the weights of a part of the copy."""
        own = {id(p): name for name, p in self._all.named_parameters()}
        return [own[id(p)] for p in part.parameters()]

    def outdate(self) -> None:
        """Mark the gathered weights as outdated, after the weights have changed."""
        self.current = False

    @torch.no_grad()
    def fill(
        self, weights: Iterable[tuple[str, Tensor]], buffers: Mapping[str, Tensor], device: torch.device | None
    ) -> None:
        """Store weights on `device`. With None, the rank only participates in gathering them.

        Args:
            weights: full weights by name; gathered one by one, so that the accelerator never holds more than one if
                `device` is the host.
            buffers: buffers, by name.
            device: where to store the weights.
        """
        self.outdate()
        own = dict(self._all.named_parameters())
        for name, x in weights:
            if device is not None:
                own[name].data = x.to(device)
        for name, buffer in self._all.named_buffers():
            buffer.copy_(buffers[name])

    def empty(self, names: Collection[str] | None = None) -> None:
        """Free the gathered weights with these names, or all."""
        self.outdate()
        for name, p in self._all.named_parameters():
            if names is None or name in names:
                p.data = _without_memory(p.shape, p.dtype, self._device)


def _without_memory(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of this shape, for those who ask for it, with the memory of a single number."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)

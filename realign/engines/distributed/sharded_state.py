"""What a sharded engine writes and restores: model folders, and checkpoints that any number of ranks can read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realign.engines.distributed.ranks import Ranks
from realign.engines.distributed.sharded_network import ShardedNetwork
from realign.engines.distributed.sharding import Saved, from_slice, is_part, part_of, read_parts
from realign.engines.training.engine_state import ModelSaver, check_finite
from realign.engines.training.stepper import Stepper
from realign.engines.training.weights import WeightAverage


class ShardedState:
    """Converts the state of an engine to shards of full tensors, and back to this rank's tensors."""

    def __init__(self, network: ShardedNetwork, stepper: Stepper | None, average: WeightAverage | None) -> None:
        """Convert states of an engine with these parts."""
        self._network = network
        self._stepper = stepper
        self._average = average

    def wrapped(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state of this rank with optimizer moments and averages as `DTensor`s."""
        out = dict(state)
        if self._stepper is not None:
            torch_state, places = state["optimizer"]["optimizer"], self._places(self._stepper)
            moments = {
                i: {name: self._as_shard(x, places[i]) for name, x in moment.items()}
                for i, moment in torch_state["state"].items()
            }
            out["optimizer"] = {**state["optimizer"], "optimizer": {**torch_state, "state": moments}}
        if self._average is not None:
            trained = [i for i, p in enumerate(self._network.owned()) if p.requires_grad]
            average = zip(state["ema"]["average"], trained, strict=True)
            out["ema"] = {"average": [self._network.like(x, i) for x, i in average]}
        return out

    def own(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's shards of a state of full tensors, or of `Saved` references to files.

        Weights become `DTensor`s. Optimizer moments and averages become plain tensors.
        """
        reader, own = _Reader(), dict(state)
        for name, part in (("module", self._network.module), ("value_head", self._network.value_head)):
            if part is not None and state[name] is not None:
                now = part.state_dict()
                # Names that the model lacks stay in the state, so that loading it reports them.
                own[name] = {k: reader.part(x, now[k]) if k in now else x for k, x in state[name].items()}
        slices = list(self._network.sharded.values())
        if self._stepper is not None and state["optimizer"] is not None:
            torch_state, places = state["optimizer"]["optimizer"], self._places(self._stepper)
            moments = {
                i: {k: reader.plain(x, slices[places[i]]) for k, x in moment.items()}
                for i, moment in torch_state["state"].items()
                if i in places
            }
            own["optimizer"] = {**state["optimizer"], "optimizer": {**torch_state, "state": moments}}
        if self._average is not None and state["ema"] is not None:
            trained = [p for p in slices if p.requires_grad]
            average = zip(state["ema"]["average"], trained, strict=True)
            own["ema"] = {"average": [reader.plain(x, p) for x, p in average]}
        reader.read()
        return own

    def _places(self, stepper: Stepper) -> dict[int, int]:
        """Map parameter indices in the optimizer's state to indices in `ShardedNetwork.owned`."""
        # The optimizer numbers its parameters by group (matrices, then vectors), not in the order of the network.
        at = {id(p): place for place, p in enumerate(self._network.owned())}
        return dict(enumerate(at[id(p)] for group in stepper.optimizer.param_groups for p in group["params"]))

    def _as_shard(self, x: Any, place: int) -> Any:
        """Wrap a moment as a shard; counts and absent moments stay unchanged."""
        return self._network.like(x, place) if isinstance(x, Tensor) and x.ndim else x


class _Reader:
    """Collects the tensors to read from the files of several ranks, so that each file is opened once."""

    def __init__(self) -> None:
        self._wanted: dict[Path, dict[str, Any]] = {}

    def part(self, x: Tensor | Saved, like: Tensor) -> Tensor:
        """Return the tensor sharded like `like`; `read` fills a tensor that comes from files."""
        if not isinstance(x, Saved):
            if x.shape != like.shape:
                raise ValueError(f"a saved tensor has shape {list(x.shape)}, but the model needs {list(like.shape)}")
            return from_slice(part_of(x, like), like) if is_part(like) else x
        wanted = self._wanted.setdefault(x.folder, {})
        if x.name not in wanted:
            wanted[x.name] = torch.empty_like(like)
        tensor: Tensor = wanted[x.name]
        return tensor

    def plain(self, x: Any, like: Any) -> Any:
        """Return this rank's shard of the tensor as a plain tensor, sharded like `like`; see `_as_shard`."""
        if not isinstance(x, Saved) and not (isinstance(x, Tensor) and x.ndim):
            return x
        part: Any = self.part(x, like)
        slice_: Tensor = part.to_local()
        # shard of a full tensor: copy it, since fused optimizers need dense moments, and to free the full tensor
        return slice_ if isinstance(x, Saved) else slice_.clone(memory_format=torch.contiguous_format)

    def read(self) -> None:
        """Fill the collected tensors from their files."""
        for folder, wanted in self._wanted.items():
            read_parts(folder, wanted)


class ShardedSaver(ModelSaver):
    """A `ModelSaver` whose methods all ranks call. Rank 0 gathers the weights on the host and writes them."""

    _network: ShardedNetwork

    def __init__(
        self, name: str, network: ShardedNetwork, tokenizer: Any, average: WeightAverage | None, ranks: Ranks
    ) -> None:
        super().__init__(name, network, tokenizer, average)
        self._ranks = ranks

    def _check(self) -> None:
        """Leave the check to `_write`, which gathers the weights."""

    def _write(self, path: Path, write: Callable[[Any, Path], None], *, with_value_head: bool) -> None:
        gathered = self._network.gather(torch.device("cpu") if self._ranks.leader else None)

        def save() -> None:
            check_finite(self._name, gathered.module, gathered.value_head)
            self._write_folder(path, gathered.module, gathered.value_head if with_value_head else None, write)

        try:
            self._ranks.lead(save)
        finally:
            # The copy is now on the host, but a rollout needs one on the device.
            self._network.gathered.empty()

"""What a sharded engine writes and restores: model folders, and checkpoints that any number of ranks can read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from typing_extensions import override

from realign.engines.distributed.ranks import Ranks
from realign.engines.distributed.saved_files import SavedFiles, plan_files
from realign.engines.distributed.shard_files import Saved, read_shards
from realign.engines.distributed.sharded_network import ShardedNetwork
from realign.engines.distributed.sharding import from_slice, is_part, part_of, writes
from realign.engines.files.folders import NewFolder, saving
from realign.engines.files.model_folder import quiet_transformers
from realign.engines.files.unread import WEIGHTS
from realign.engines.network.trains import SCALAR_HEADS
from realign.engines.training.engine_state import Content, ModelSaver
from realign.engines.training.stepper import Stepper
from realign.engines.training.weights import VALUE_HEAD, WeightAverage


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
                own[name] = {k: reader.weight(x, now[k]) if k in now else x for k, x in state[name].items()}
        slices = list(self._network.sharded.values())
        if self._stepper is not None and state["optimizer"] is not None:
            torch_state, places = state["optimizer"]["optimizer"], self._places(self._stepper)
            if unknown := torch_state["state"].keys() - places.keys():
                raise ValueError(f"the saved optimizer has moments of parameter {min(unknown)}, which the model lacks")
            moments = {
                i: {k: reader.plain(x, slices[places[i]]) for k, x in moment.items()}
                for i, moment in torch_state["state"].items()
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
    """Collects the tensors to read from the files of several ranks, so that nothing changes before all are known."""

    def __init__(self) -> None:
        self._wanted: dict[int, tuple[Saved, Tensor]] = {}

    def weight(self, x: Tensor | Saved, like: Tensor) -> Tensor:
        """Return a weight sharded like `like`; one that is in files will be read into the memory of `like`."""
        return self._part(x, like, lambda: like)

    def plain(self, x: Any, like: Any) -> Any:
        """Return this rank's shard of the tensor as a plain tensor, sharded like `like`; see `_as_shard`."""
        if not isinstance(x, Saved) and not (isinstance(x, Tensor) and x.ndim):
            return x
        part: Any = self._part(x, like, lambda: torch.empty_like(like))
        slice_: Tensor = part.to_local()
        # shard of a full tensor: copy it, since fused optimizers need dense moments, and to free the full tensor
        return slice_ if isinstance(x, Saved) else slice_.clone(memory_format=torch.contiguous_format)

    def _part(self, x: Tensor | Saved, like: Tensor, into: Callable[[], Tensor]) -> Tensor:
        if x.shape != like.shape:
            raise ValueError(f"a saved tensor has shape {list(x.shape)}, but the model needs {list(like.shape)}")
        if not isinstance(x, Saved):
            return from_slice(part_of(x, like), like) if is_part(like) else x
        # By identity: tied weights are saved once.
        return self._wanted.setdefault(id(x), (x, into()))[1]

    def read(self) -> None:
        """Fill the collected tensors from their files."""
        read_shards(self._wanted.values())


class ShardedSaver(ModelSaver):
    """A `ModelSaver` whose methods all ranks call. Each rank writes its slices into the folder that rank 0 names."""

    _network: ShardedNetwork

    def __init__(
        self, name: str, network: ShardedNetwork, tokenizer: Any, average: WeightAverage | None, ranks: Ranks
    ) -> None:
        super().__init__(name, network, tokenizer, average)
        self._ranks = ranks

    @override
    def _write(self, path: Path, content: Content, *, with_value_head: bool) -> None:
        with ExitStack() as stack:
            folder: NewFolder | None = None

            def begin() -> tuple[Path, Path]:
                nonlocal folder
                folder = NewFolder(path)
                stack.callback(folder.remove)
                return folder.path, path

            new, target = self._ranks.lead(begin)
            files = None
            if content is not Content.adapters and all(self._ranks.gather(new.parent.is_dir())):
                files = self._ranks.lead(lambda: self._begun(new, target, with_value_head))
            if files is None:
                self._write_gathered(new, target, content, with_value_head)
            else:
                self._write_slices(new, target, files, updated=content is Content.full)
            self._ranks.lead(lambda: None if folder is None else folder.publish())

    def _begun(self, new: Path, target: Path, with_value_head: bool) -> SavedFiles | None:
        """Write all files but the weights, and create those; None if ranks cannot write slices into them."""
        network, module = self._network, self._network.gathered.module
        weights = network.trains.base_weights(network.module)
        # One value in place of each weight: transformers then writes the other files, and drops the names that it does
        # not save. Tied weights have the same.
        stand_ins = {id(x): torch.zeros(1, dtype=x.dtype) for x in weights.values()}
        with saving(target):
            with quiet_transformers():
                state = {name: stand_ins[id(x)] for name, x in weights.items()}
                module.save_pretrained(new, state_dict=state, save_original_format=False)
            saved = load_file(new / WEIGHTS).keys()
            (new / WEIGHTS).unlink()
            names = [name for name in weights if name in saved]
            files = plan_files(network.module, weights, names, network.value_head if with_value_head else None)
            if files is not None:
                self._add_tokenizer(new, target)
                files.create(new)
        return files

    def _write_slices(self, new: Path, target: Path, files: SavedFiles, *, updated: bool) -> None:
        network = self._network
        weights = network.trains.base_weights(network.module)
        updates = {}
        if updated and network.trains.only_adds:
            added = [name for name in self._added(weights) if name.startswith("module.")]
            updates = network.trains.updates(network.gather(network.device, added).module)
        if network.value_head is not None:
            head = network.value_head.state_dict(keep_vars=True)
            weights |= {f"{VALUE_HEAD}{name}": x for name, x in head.items()}
        own = {name: x for name, x in weights.items() if name in files.places and writes(x, self._ranks)}

        @torch.no_grad()
        def write() -> None:
            with saving(target):
                files.write(new, own, updates)

        try:
            self._ranks.together(write)
        finally:
            if updates:
                network.gathered.empty()

    def _write_gathered(self, new: Path, target: Path, content: Content, with_value_head: bool) -> None:
        """Let rank 0 write a folder: adapters, which are few, or a model that ranks cannot write in slices."""
        network = self._network
        weights = network.trains.base_weights(network.module)
        heads = tuple(f"{name}." for name in SCALAR_HEADS)
        base = {name: x for name, x in weights.items() if not name.startswith(heads)}
        names = self._added(base) if content is Content.adapters else None
        gathered = network.gather(torch.device("cpu") if self._ranks.leader else None, names)

        def write() -> None:
            with saving(target):
                head = gathered.value_head if with_value_head else None
                self._fill(new, target, content, gathered.module, head)

        try:
            self._ranks.lead(write)
        finally:
            # The copy is now on the host, but a rollout needs one on the device.
            gathered.empty()

    def _added(self, base: Mapping[str, Tensor]) -> list[str]:
        """Return the names, in the network, of the weights that are not in `base`."""
        known = set(map(id, base.values()))
        return [name for name, p in self._network.sharded.items() if id(p) not in known]

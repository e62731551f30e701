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

from realign.engines.distributed.saved_files import SavedFiles, plan_files
from realign.engines.distributed.shard_files import Saved, read_shards
from realign.engines.distributed.sharded_network import ShardedNetwork
from realign.engines.training.engine_state import Content, ModelSaver
from realign.engines.training.stepper import Stepper
from realign.engines.training.weights import VALUE_HEAD, WeightAverage
from realign.models.files.folders import NewFolder, saving
from realign.models.files.model_folder import WEIGHTS, quiet_transformers
from realign.models.network.trains import SCALAR_HEADS
from realign.models.parts import from_slice, is_part, part_of, writes
from realign.own_files import remove_file
from realign.ranks import Ranks


class ShardedState:
    """Converts the state of an engine to shards of full tensors, and back to this rank's tensors."""

    def __init__(self, network: ShardedNetwork, stepper: Stepper | None, average: WeightAverage | None) -> None:
        """Convert states of an engine with these parts."""
        self._network = network
        self._stepper = stepper
        self._average = average

    def wrap(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state of this rank with optimizer moments and averages as shards, numbered as in one process."""
        out, network = dict(state), self._network
        if self._stepper is not None:
            torch_state, numbers = state["optimizer"]["optimizer"], self._numbers(self._stepper)
            names = dict(zip(numbers, self._names(self._stepper), strict=True))
            own = {numbers[i]: moments for i, moments in torch_state["state"].items()}
            moments = {
                number: {key: self._as_shard(x, names[number]) for key, x in values.items()}
                for number, values in own.items()
            }
            out["optimizer"] = {**state["optimizer"], "optimizer": {**torch_state, "state": moments}}
            if network.mesh.pipeline is not None:
                out["optimizer"]["optimizer"] = self._of_all_stages(moments, torch_state["param_groups"][0])
        if self._average is not None:
            names_of_own = [name for name in network.weights.sharded if network.weights.placed[name].trained]
            average = dict(zip(names_of_own, state["ema"]["average"], strict=True))
            shards = {name: from_slice(x, network.weights.sharded[name]) for name, x in average.items()}
            out["ema"] = {
                "average": [network.weights.part(name, shards.get(name)) for name in self._names_that_train()]
            }
        return out

    def _of_all_stages(self, moments: dict[int, Any], group: Mapping[str, Any]) -> dict[str, Any]:
        """Add what other stages have to the optimizer state of this one, without values; `group` has its settings."""
        network, trained = self._network, self._names_in_optimizer_order()
        of_other = {
            number: {key: x.dtype if is_part(x) else x for key, x in values.items()}
            for number, values in moments.items()
        }
        assert network.mesh.pipeline is not None
        for stage in network.host.gather(of_other, network.mesh.pipeline.get_group()):
            for number, values in stage.items():
                moments.setdefault(
                    number,
                    {
                        key: network.weights.part(trained[number], None, x) if isinstance(x, torch.dtype) else x
                        for key, x in values.items()
                    },
                )
        matrices = sum(network.weights.placed[name].like.ndim >= 2 for name in trained)
        groups = [  # as in `parameter_groups`
            {**group, "params": list(range(matrices))},
            {**group, "params": list(range(matrices, len(trained))), "weight_decay": 0.0},
        ]
        return {"state": dict(sorted(moments.items())), "param_groups": [group for group in groups if group["params"]]}

    def own_shards(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's shards of a state of full tensors, or of `Saved` references to files.

        Weights become `DTensor`s. Optimizer moments and averages become plain tensors.
        """
        reader, own, network = _Reader(), dict(state), self._network
        for name, part in (("module", network.module), ("value_head", network.value_head)):
            if part is not None and state[name] is not None:
                now = part.state_dict()
                # Names that no stage has stay in the state, so that loading it reports them.
                own[name] = {
                    k: reader.weight(x, now[k]) if k in now else x
                    for k, x in state[name].items()
                    if k in now or f"{name}.{k}" not in network.weights.names
                }
        if self._stepper is not None and state["optimizer"] is not None:
            torch_state, places = state["optimizer"]["optimizer"], dict(enumerate(self._names(self._stepper)))
            numbers = {number: i for i, number in enumerate(self._numbers(self._stepper))}
            if unknown := torch_state["state"].keys() - set(range(len(self._names_that_train()))):
                raise ValueError(f"the saved optimizer has moments of parameter {min(unknown)}, which the model lacks")
            moments = {
                numbers[number]: {
                    k: reader.plain(x, network.weights.sharded[places[numbers[number]]]) for k, x in moment.items()
                }
                for number, moment in torch_state["state"].items()
                if number in numbers
            }
            groups = torch_state["param_groups"]
            if network.mesh.pipeline is not None:  # those of the whole model have the weights of other stages
                groups = self._stepper.optimizer.state_dict()["param_groups"]
            own["optimizer"] = {**state["optimizer"], "optimizer": {"state": moments, "param_groups": groups}}
        if self._average is not None and state["ema"] is not None:
            average = zip(state["ema"]["average"], self._names_that_train(), strict=True)
            slices = network.weights.sharded
            own["ema"] = {"average": [reader.plain(x, slices[name]) for x, name in average if name in slices]}
        reader.read()
        return own

    def _names_that_train(self) -> list[str]:
        """Return the names of all weights that train, on whichever stage."""
        return [name for name, placed in self._network.weights.placed.items() if placed.trained]

    def _names_in_optimizer_order(self) -> list[str]:
        """Return them in the order in which the optimizer of one process numbers them: matrices, then vectors."""
        return sorted(self._names_that_train(), key=lambda name: self._network.weights.placed[name].like.ndim < 2)

    def _names(self, stepper: Stepper) -> list[str]:
        """Return the names of the parameters of this rank's optimizer, in its order."""
        pairs = zip(self._network.weights.sharded, self._network.own_parameters(), strict=True)
        names = {id(p): name for name, p in pairs}
        return [names[id(p)] for group in stepper.optimizer.param_groups for p in group["params"]]

    def _numbers(self, stepper: Stepper) -> list[int]:
        """Return the numbers, in the optimizer of one process, of the parameters of this rank's optimizer."""
        numbers = {name: number for number, name in enumerate(self._names_in_optimizer_order())}
        return [numbers[name] for name in self._names(stepper)]

    def _as_shard(self, x: Any, name: str) -> Any:
        """Wrap a moment as a shard; counts and absent moments stay unchanged."""
        if not isinstance(x, Tensor) or not x.ndim:
            return x
        return self._network.weights.part(name, from_slice(x, self._network.weights.sharded[name]), x.dtype)


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
                files = self._ranks.lead(lambda: self._create_files(new, target, with_value_head))
            if files is None:
                self._write_gathered(new, target, content, with_value_head)
            else:
                self._write_slices(new, target, files, updated=content is Content.full)
            self._ranks.lead(lambda: None if folder is None else folder.publish())

    def _create_files(self, new: Path, target: Path, with_value_head: bool) -> SavedFiles | None:
        """Write all files but the weights, and create those; None if ranks cannot write slices into them."""
        network, module = self._network, self._network.weights.gathered.module
        weights = network.weights.base_weights()
        # One value in place of each weight: transformers then writes the other files, and drops the names that it does
        # not save. Tied weights have the same.
        stand_ins = {id(x): torch.zeros(1, dtype=x.dtype) for x in weights.values()}
        with saving(target):
            with quiet_transformers():
                state = {name: stand_ins[id(x)] for name, x in weights.items()}
                module.save_pretrained(new, state_dict=state, save_original_format=False)
            saved = load_file(new / WEIGHTS).keys()
            remove_file(new / WEIGHTS)
            names = [name for name in weights if name in saved]
            total, _ = network.counts()
            if network.value_head is not None and with_value_head:
                head = (network.value_head_state(), network.value_head.metadata)
                files = plan_files(network.module, weights, names, total, *head)
            else:
                files = plan_files(network.module, weights, names, total)
            if files is not None:
                self._add_tokenizer(new, target)
                files.create(new)
        return files

    def _write_slices(self, new: Path, target: Path, files: SavedFiles, *, updated: bool) -> None:
        network = self._network
        weights = network.trains.base_weights(network.module)
        updates = {}
        if updated and network.trains.only_adds:
            added = [
                name for name in self._names_missing_in(network.weights.base_weights()) if name.startswith("module.")
            ]
            updates = network.trains.updates(network.weights.gather(network.device, added).module)
        if network.value_head is not None:
            head = network.value_head.state_dict(keep_vars=True)
            weights |= {f"{VALUE_HEAD}{name}": x for name, x in head.items()}
        own = {
            name: x
            for name, x in weights.items()
            if name in files.places and network.weights.saves(x) and writes(x, self._ranks, network.weights.first_rank)
        }

        @torch.no_grad()
        def write() -> None:
            with saving(target):
                files.write(new, own, updates)

        try:
            self._ranks.together(write)
        finally:
            if updates:
                network.weights.gathered.empty()

    def _write_gathered(self, new: Path, target: Path, content: Content, with_value_head: bool) -> None:
        """Let rank 0 write a folder: adapters, which are few, or a model that ranks cannot write in slices."""
        network = self._network
        weights = network.weights.base_weights()
        heads = tuple(f"{name}." for name in SCALAR_HEADS)
        base = {name: x for name, x in weights.items() if not name.startswith(heads)}
        names = self._names_missing_in(base) if content is Content.adapters else None
        gathered = network.weights.gather(torch.device("cpu") if self._ranks.leader else None, names)

        def write() -> None:
            with saving(target):
                head = gathered.value_head if with_value_head else None
                self._fill(new, target, content, gathered.module, head)

        try:
            self._ranks.lead(write)
        finally:
            # The copy is now on the host, but a rollout needs one on the device.
            gathered.empty()

    def _names_missing_in(self, base: Mapping[str, Tensor]) -> list[str]:
        """Return the names, in the network, of the weights that `base` (`ShardedNetwork.base_weights`) lacks."""
        known = set(map(id, base.values()))
        return [name for name, placed in self._network.weights.placed.items() if id(placed.like) not in known]

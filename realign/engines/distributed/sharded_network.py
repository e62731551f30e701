"""`ShardedNetwork`: FSDP2 over the mesh of ranks, tensor parallelism within layers, and full copies for rollouts.

A rank stores a slice of every weight and of its optimizer state. A layer is gathered only while it computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from typing_extensions import override

from realign.api.lengths import Lengths
from realign.api.microbatch import MicroBatchSpec
from realign.api.sample import TOKENS, SequenceSample
from realign.engines.distributed.consistency import check_same_slices
from realign.engines.distributed.context_parallel import Ulysses, sum_over_ranks
from realign.engines.distributed.divisions import Divisions, check_trained_stages, no_replay
from realign.engines.distributed.expert_parallel import divide_experts, experts_of
from realign.engines.distributed.mesh import Mesh
from realign.engines.distributed.pipeline_parallel import Cut, Stage, in_stages
from realign.engines.distributed.sharded_gradients import ShardedGradients
from realign.engines.distributed.sharded_weights import GatheredCopy, Placed, ShardedWeights, place_on
from realign.engines.distributed.sharding import Sharding
from realign.engines.distributed.tensor_parallel import split_layers, split_styles, split_vocabulary
from realign.engines.training.weights import VALUE_HEAD
from realign.errors import ConfigError
from realign.functional.logprobs import LMHead, WordShard
from realign.models.files.unread import Unread
from realign.models.host import Host
from realign.models.network.abilities import Abilities, prepare_module
from realign.models.network.branches import read_stack
from realign.models.network.heads import read_body
from realign.models.network.kernels import CONTEXT
from realign.models.network.network import Network
from realign.models.network.output import RowsOfRank, ScalarHead
from realign.models.network.passes import Layout, Passes
from realign.models.network.probe import TOLERANCE, probe_divided, probe_stages
from realign.models.network.settings import NetworkSettings
from realign.models.network.trains import adapted_layers
from realign.models.network.value_head import ValueNetwork
from realign.models.parts import from_slice, slices_of

NOTHING = SequenceSample(("nothing",), {TOKENS: torch.zeros(0, dtype=torch.int64)}, {TOKENS: Lengths.of([[0]])})
"""A micro-batch without tokens. A pass over it runs the collectives of a normal pass, and changes nothing."""


class ShardedNetwork(Network):
    """A network of which each rank stores a slice. Its methods are collectives: all ranks must call them.

    The network itself is the FSDP root. Before a pass the root gathers embeddings, final norm and heads. Losses also
    use them after the pass, so they stay gathered until `rest` or the end of the backward pass.
    """

    def __init__(
        self,
        name: str,
        module: Any,
        settings: NetworkSettings,
        value_head: ValueNetwork | None,
        sharding: Sharding,
        probed: Any = None,
        host: Host | None = None,
    ) -> None:
        """Probe the model and keep a slice of it; other arguments as in `Network`.

        Unread weights are read here, only this rank's slices of them. Other weights are complete on every rank.

        Raises:
            ConfigError: the family cannot run packed, its layers are not found, its tensor-parallel plan is not
                supported, or torch is too old.
            DataError: the ranks have read different weights.
        """
        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise ConfigError(
                f"models.{name}.sharding: torch {torch.__version__} is too old. Install torch 2.13 or later."
            )
        abilities = prepare_module(name, module, settings, value_head, probed)
        super().__init__(name, module, settings, _abilities_of_ranks(name, abilities, sharding), value_head, host)
        probed = module if probed is None else probed
        branch = 0 if value_head is None else value_head.spec.layers
        divisions = Divisions(name, module, self.trains, branch, settings.torch_compile.compiles)
        divisions.check(sharding, dist.get_world_size())
        self.mesh = Mesh.of(name, sharding, self.device, self.host)
        self._check_context(probed)
        # What the undivided modules say, before each step below takes something away from them.
        layers, trunk = read_stack(module).layers, {id(p) for p in read_body(module).parameters()}
        heads = [name for name, p in self.named_parameters() if id(p) not in trunk and p.requires_grad]
        self._counts, self._words = super().counts(), super().words
        gathered, rows = GatheredCopy(module, value_head), len(module.get_input_embeddings().weight)
        unread = self._set_aside()
        names, (self.stage, placed) = self._names(), self._cut(divisions, sharding, probed)
        experts, self._word_shard, summed = self._divide(layers, sharding, rows)
        # After all other dimensions: FSDP divides what they leave to a rank; see `slices_of`.
        self._shard(layers, experts, sharding, settings.dtype)
        self._read(unread)
        self.weights = ShardedWeights(self, placed, names, gathered, self.mesh)
        self.gradients = ShardedGradients(self, self.weights, self.mesh, self.stage, heads, summed)

    def _check_context(self, probed: Any) -> None:
        """Check that ranks can divide the rows of a pass.

        Raises:
            ConfigError: the family does not allow it.
        """
        if (context := self.mesh.context) is None:
            return
        key = f"models.{self.name}.sharding.context={context.size()}"
        family = f"model family {probed.config.model_type!r}"
        attend = partial(Ulysses, group=context.get_group())
        try:
            error = probe_divided(probed, attend, context.size(), context.get_local_rank())
        except ConfigError as raised:
            raise ConfigError(f"{key}: {raised}") from raised
        if self.host.most(not error <= TOLERANCE):  # also for NaN
            raise ConfigError(
                f"{key}: {family} computes other results if ranks divide a sequence, since more than its attention "
                "mixes tokens. Remove this key."
            )

    def _names(self) -> dict[str, str]:
        """Return the first name of each weight, which has several if it is tied."""
        first: dict[int, str] = {id(p): name for name, p in self.named_parameters()}
        return {name: first[id(p)] for name, p in self.named_parameters(remove_duplicate=False)}

    def _cut(self, divisions: Divisions, sharding: Sharding, probed: Any) -> tuple[Stage | None, dict[str, Placed]]:
        """Remove the weights of other stages of the pipeline.

        Returns:
            The stage of this rank, and all weights of the model by name.

        Raises:
            ConfigError: the layers of this family cannot be computed apart.
        """
        if self.mesh.pipeline is None:
            return None, {name: place_on(p, [0]) for name, p in self.named_parameters()}
        if self.host.most(int(not probe_stages(probed, in_stages) <= TOLERANCE)):  # also for NaN
            key, family = f"sharding.pipeline={sharding.pipeline}", f"model family {probed.config.model_type!r}"
            raise ConfigError(
                f"models.{self.name}.{key}: {family} computes other results if its layers are apart. Remove this key."
            )
        stage = Stage(self.mesh.pipeline, self.mesh.slices, self._width, self.device)
        cut = Cut(self, self.module, divisions.stages(stage.stages))
        placed = {name: place_on(p, cut.owners(p)) for name, p in self.named_parameters()}
        cut.drop(stage.index)
        cut.pass_through(stage.index, stage)
        return stage, placed

    @property
    def _width(self) -> int:
        """Size of the hidden states between layers."""
        width: int = self.module.config.get_text_config().hidden_size
        return width

    def _divide(
        self, layers: nn.ModuleList, sharding: Sharding, rows: int
    ) -> tuple[list[nn.Module], WordShard | None, dict[str, DeviceMesh]]:
        """Divide layers and vocabulary by the dimensions `tensor` and `expert`.

        Returns:
            The parts with experts, the words of this rank, and the weights of `ShardedGradients` to sum.
        """
        mesh, words, summed = self.mesh, None, dict[str, DeviceMesh]()
        experts = experts_of(self.module, layers) if mesh.expert.size() > 1 else {}
        adapted = {} if self.trains.adapter_rank is None else adapted_layers(layers)
        above = next(path for path, part in self.named_modules() if part is layers)
        for path, part in experts.items():
            names = divide_experts(part, mesh.expert, mesh.tensor, self.host, adapted=path in adapted)
            summed |= {f"{above}.{path}.{name}": mesh.expert for name in names}
        if sharding.tensor > 1:
            split = split_styles(self.name, self.module, layers, sharding.tensor, adapted=adapted, experts=experts)
            split_layers(layers, mesh.tensor, split)
            summed |= {f"{above}.{path}": mesh.tensor for path in split.copied}
            embeds = self.stage is None or self.stage.first
            words = split_vocabulary(self.name, self.module, mesh.tensor, rows, self.words or None, embeds=embeds)
        return list(experts.values()), words, summed

    def _shard(
        self, layers: nn.ModuleList, experts: Sequence[nn.Module], sharding: Sharding, dtype: torch.dtype
    ) -> None:
        # Layers are gathered in the dtype of their products. Their inputs stay in fp32, as under autocast. The root
        # and its heads also stay in fp32, so log-probs, values and scores are computed in fp32.
        low = dtype if dtype == torch.bfloat16 else None
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
        offload = CPUOffloadPolicy() if sharding.offload else OffloadPolicy()
        parts = [*((part, self.mesh.expert_fsdp) for part in experts), *((layer, self.mesh.fsdp) for layer in layers)]
        for part, mesh in parts:
            if next(part.parameters(), None) is None:
                continue  # on another stage
            fully_shard(
                part,
                mesh=mesh,
                reshard_after_forward=sharding.reshard,
                mp_policy=policy,
                offload_policy=offload,
            )
        fully_shard(self, mesh=self.mesh.fsdp, reshard_after_forward=False, offload_policy=offload)
        root: Any = self
        for part in self.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)  # the loss is divided once, by the weight of the whole batch
                part.set_force_sum_reduction_for_comms(True)
        # the losses of some ranks may not reach a head, but all ranks must reduce the same tensors
        root.set_reduce_scatter_unused_params(True)

    def _set_aside(self) -> dict[str, Unread]:
        """Replace unread weights by plain tensors without memory, which FSDP can divide; return them by name."""
        unread: dict[str, Unread] = {name: p for name, p in self.named_parameters() if isinstance(p, Unread)}
        empty: dict[int, nn.Parameter] = {}
        for module in self.modules():
            for name, p in module.named_parameters(recurse=False):
                if isinstance(p, Unread):
                    plain = nn.Parameter(torch.empty(p.shape, device="meta"), p.requires_grad)
                    # By id, so that tied weights stay one parameter.
                    setattr(module, name, empty.setdefault(id(p), plain))
        return unread

    @torch.no_grad()
    def _read(self, unread: Mapping[str, Unread]) -> None:
        """Read this rank's slices of the weights that were set aside, one by one."""
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in self.modules():
            for name, p in module.named_parameters(recurse=False):
                places.setdefault(id(p), []).append((module, name))
        digests: dict[str, str] = {}
        expected: dict[str, str] = {}
        own = {name: slices_of(like) for name, like in self.named_parameters() if name in unread}  # type: ignore[arg-type]
        everyone = self.host.gather(own) if unread else [own]
        after = everyone[(dist.get_rank() + 1) % len(everyone)]
        for name, weight in unread.items():
            if name in own:
                like: Any = self.get_parameter(name)
                values = weight.read(own[name])
                digests[name] = self.host.digest(values)
                part = nn.Parameter(from_slice(values.to(self.device), like), like.requires_grad)
                for module, attribute in places[id(like)]:  # several for tied weights
                    setattr(module, attribute, part)
            # Reads a slice that this rank doesn't keep: its neighbor reads it too, and must find the same bytes.
            if name in after:
                expected[name] = self.host.digest(weight.read(after[name]))
        if unread:
            self.load_state_dict({}, strict=False)  # FSDP looks at its parameters again after it
            named = tuple({k.removeprefix("module."): x for k, x in read.items()} for read in (digests, expected))
            check_same_slices(self.name, self.host.gather(named))

    @property
    @override
    def rollout_module(self) -> Any:
        return self.weights.gathered.module

    @property
    @override
    def rollout_value_head(self) -> ValueNetwork | None:
        return self.weights.gathered.value_head

    def own_parameters(self) -> list[nn.Parameter]:
        """Return this rank's slices as plain tensors, see `ShardedWeights`."""
        return self.weights.own_parameters

    @property
    def stages(self) -> int:
        """Number of stages of the pipeline."""
        return 1 if self.stage is None else self.stage.stages

    def check_trained(self) -> None:
        """Check that each stage has a weight that trains; see `check_trained_stages` for errors."""
        trained = [placed.stages for placed in self.weights.placed.values() if placed.trained]
        check_trained_stages(self.name, self.trains, trained, self.stages)

    @property
    def later_stages(self) -> int:
        """Number of stages after that of this rank."""
        return 0 if self.stage is None else self.stages - 1 - self.stage.index

    @override
    def counts(self) -> tuple[int, int]:
        return self._counts

    @property
    @override
    def words(self) -> int:
        return self._words

    @override
    def limit_head(self, head: LMHead) -> LMHead:
        # A stage before the last one has no weight of the head, and computes no results.
        return super().limit_head(head) if self.stage is None or self.stage.last else head

    @override
    def read_head(self, *, dropout: bool) -> LMHead | ScalarHead:
        head = super().read_head(dropout=dropout)
        if self._word_shard is None or not isinstance(head, LMHead) or head.weight_VH is None:
            return head
        weight_VH: Any = head.weight_VH
        bias_V: Any = head.bias_V
        own_V = None if bias_V is None else bias_V.to_local()
        return replace(head, weight_VH=weight_VH.to_local(), bias_V=own_V, shard=self._word_shard)

    @override
    def forward(self, **inputs: Any) -> Tensor:
        hidden = super().forward(**inputs)
        return hidden.clone() if hidden._is_view() else hidden  # FSDP needs a tensor that is not a view for its hooks

    @override
    def passes(
        self, data: SequenceSample, mb_spec: MicroBatchSpec, *, parallel: bool = False, training: bool = False
    ) -> Passes:
        passes = super().passes(data, mb_spec, parallel=parallel, training=training)
        return replace(passes, layouts=tuple(map(self._divide_rows, passes.layouts)))

    def _divide_rows(self, layout: Layout) -> Layout:
        """Return the layout with the rows of this rank, if ranks divide the rows of a pass."""
        context = self.mesh.context
        return layout if context is None else layout.divide(context.size(), context.get_local_rank())

    def _hidden(self, moved: SequenceSample, layout: Layout) -> Tensor:
        if layout.pieces.any():
            return self._hidden_of_stage(moved, layout)
        # All ranks must call the layers together. One without tokens computes a single token, and drops it.
        token = moved.with_data({TOKENS: moved[TOKENS].new_zeros(1)}, lengths=Lengths.of([[1]]))
        return self._hidden_of_stage(token, self._divide_rows(Layout.plain(token.lengths[TOKENS])))[:0]

    def _hidden_of_stage(self, moved: SequenceSample, layout: Layout) -> Tensor:
        """Return the hidden states after the layers of this stage, which it has sent to the next one."""
        if self.stage is None:
            return super()._hidden(moved, layout)
        self.stage.receive(layout.rows if layout.own is None else len(layout.own))
        hidden_RH = super()._hidden(moved, layout)
        self.stage.pass_on(hidden_RH)
        return hidden_RH

    @override
    def _inputs(self, tokens_T: Tensor, layout: Layout) -> dict[str, Any]:
        inputs = super()._inputs(tokens_T, layout)
        if (context := self.mesh.context) is not None:
            inputs[CONTEXT] = Ulysses(inputs[CONTEXT], context.get_group())
        return inputs

    @override
    def _rows_of_rank(self, layout: Layout) -> RowsOfRank | None:
        context, predicted_T = self.mesh.context, layout.predicted_T
        if context is None or layout.own is None or predicted_T is None:
            return None
        return RowsOfRank(layout.own, layout.rows, predicted_T, partial(sum_over_ranks, group=context.get_group()))

    def idle(self, *, training: bool = False) -> Tensor:
        """Run a pass without tokens while other ranks still have micro-batches; return its hidden states [0, H]."""
        moved = NOTHING.to(self.device)
        return self.run(NOTHING, moved, Layout.plain(moved.lengths[TOKENS]), training=training).hidden_RH

    def rest(self) -> None:
        """Free the weights that stay gathered after a pass without gradient.

        The next pass then gathers the current weights.
        """
        root: Any = self
        root.reshard()
        if self.stage is not None:
            self.stage.settle()

    @override
    def nonfinite_weight(self) -> str | None:
        own = next((name for name, p in self.weights.sharded.items() if not bool(p.to_local().isfinite().all())), None)
        name = next((name for name in self.host.gather(own) if name is not None), None)
        return None if name is None else name.removeprefix("module.")

    @override
    def requires_grad_(self, requires_grad: bool = True) -> Self:
        self.weights.set_trained(requires_grad)
        return super().requires_grad_(requires_grad)

    @override
    def module_state(self, *, fixed: bool) -> dict[str, Tensor]:
        own = super().module_state(fixed=fixed)
        if self.stage is None:
            return own
        state = {}
        for name in self.weights.gathered.module.state_dict():
            of = self.weights.names.get(f"module.{name}")
            if of is None and name in own:  # a buffer
                state[name] = own[name]
            elif of is not None and self.weights.placed[of].trained != fixed:
                state[name] = self.weights.weight(of)
        return state

    @override
    def value_head_state(self) -> dict[str, Tensor]:
        copy = self.weights.gathered.value_head
        if self.stage is None or copy is None:
            return super().value_head_state()
        return {name: self.weights.weight(f"{VALUE_HEAD}{name}") for name in copy.state_dict()}


def _abilities_of_ranks(name: str, abilities: Abilities, sharding: Sharding) -> Abilities:
    """Return what a model can do if ranks divide it.

    Raises:
        ConfigError: it cannot run packed.
    """
    if abilities.unpacked is not None:
        raise ConfigError(
            f"models.{name}.sharding: requires a model that can run packed. {abilities.unpacked.reason.rstrip('.')}. "
            "Use one process."
        )
    abilities = replace(abilities, images=None)  # its vision layers would run outside the FSDP root
    return abilities if sharding.pipeline == 1 else replace(abilities, replay=None, no_replay=no_replay(name, sharding))

"""`ShardedNetwork`: FSDP2 over the mesh of ranks, tensor parallelism within layers, and full copies for rollouts.

A rank stores a slice of every weight and of its optimizer state. A layer is gathered only while it computes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from typing_extensions import override

from realign.api.lengths import Lengths
from realign.api.microbatch import MicroBatchSpec
from realign.api.sample import TOKENS, SequenceSample
from realign.engines.distributed.consistency import check_same_slices
from realign.engines.distributed.context_parallel import Ulysses, summed
from realign.engines.distributed.divisions import Divisions, check_trained_stages, no_replay
from realign.engines.distributed.expert_parallel import divide_experts, experts_of
from realign.engines.distributed.mesh import Mesh
from realign.engines.distributed.pipeline_parallel import Cut, PartOfStage, Stage, first_rank, in_stages
from realign.engines.distributed.sharding import Sharding
from realign.engines.distributed.tensor_parallel import split_layers, split_styles, split_vocabulary
from realign.engines.training.weights import VALUE_HEAD, named_weights
from realign.errors import ConfigError
from realign.functional.logprobs import LMHead, WordShard
from realign.models.files.unread import Unread
from realign.models.host import Host
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
from realign.models.parts import from_slice, slices_of, whole
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
        super().__init__(name, module, settings, value_head, probed, host)
        self.images = None  # its vision layers would run outside the FSDP root
        if self.unpacked is not None:
            raise ConfigError(
                f"models.{name}.sharding: requires a model that can run packed. {self.unpacked.reason.rstrip('.')}. "
                "Use one process."
            )
        branch = 0 if value_head is None else value_head.spec.layers
        divisions = Divisions(name, module, self.trains, branch, settings.torch_compile.compiles)
        divisions.check(sharding, dist.get_world_size())
        layers = read_stack(module).layers
        self.mesh = Mesh.of(name, sharding, self.device, self.host)
        self._check_context(module if probed is None else probed)
        # Before the modules are sharded: this is an ordinary copy of their classes, without memory.
        self.gathered = GatheredCopy(module, self.value_head)
        unread = self._set_aside()
        # A loss may use any of the heads or none, so their gradients are tracked apart from those of the trunk.
        trunk = {id(p) for p in read_body(module).parameters()}
        self._heads = [name for name, p in self.named_parameters() if id(p) not in trunk and p.requires_grad]
        self._counts, self._words = super().counts(), super().words
        self._rows = len(module.get_input_embeddings().weight)
        self.stage, self.placed = self._cut(divisions, sharding, module if probed is None else probed)
        self._word_shard: WordShard | None = None
        self._summed: dict[str, DeviceMesh] = {}
        """Weights that ranks have in full and apply to different heads or experts: the gradient is the sum over these
        ranks."""
        # Before FSDP, which divides what other dimensions leave to a rank; see `slices_of`.
        experts = self._divide(layers, sharding)
        self._shard(layers, experts, sharding, settings.dtype)
        self._read(unread)
        self.sharded: dict[str, Any] = dict(self.named_parameters())
        """The slices by name, as `DTensor`s."""
        self._reached: set[str] = set()
        self._reduces, self._unreduced = True, False
        # Plain tensors in the memory of the shards: an optimizer step on them is one on the network. A `DTensor`
        # optimizer couldn't combine the weights of two meshes (ADR 15).
        self._owned = [nn.Parameter(p.detach().to_local(), p.requires_grad) for p in self.sharded.values()]

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

    def _cut(self, divisions: Divisions, sharding: Sharding, probed: Any) -> tuple[Stage | None, dict[str, Placed]]:
        """Remove the weights of other stages of the pipeline.

        Returns:
            The stage of this rank, and all weights of the model by name.

        Raises:
            ConfigError: the layers of this family cannot be computed apart.
        """
        first: dict[int, str] = {id(p): name for name, p in self.named_parameters()}
        self.names = {name: first[id(p)] for name, p in self.named_parameters(remove_duplicate=False)}
        """The name in `placed` of each weight, which may have another name if it is tied."""
        if self.mesh.pipeline is None:
            return None, {name: _placed(p, [0]) for name, p in self.named_parameters()}
        if self.host.most(int(not probe_stages(probed, in_stages) <= TOLERANCE)):  # also for NaN
            key, family = f"sharding.pipeline={sharding.pipeline}", f"model family {probed.config.model_type!r}"
            raise ConfigError(
                f"models.{self.name}.{key}: {family} computes other results if its layers are apart. Remove this key."
            )
        stage = Stage(self.mesh.pipeline, self.mesh.slices, self._width, self.device)
        cut = Cut(self, self.module, divisions.stages(stage.stages))
        placed = {name: _placed(p, cut.owners(p)) for name, p in self.named_parameters()}
        cut.drop(stage.index)
        cut.pass_through(stage.index, stage)
        self.replay, self.no_replay = None, no_replay(self.name, sharding)
        return stage, placed

    @property
    def _width(self) -> int:
        """Size of the hidden states between layers."""
        width: int = self.module.config.get_text_config().hidden_size
        return width

    def _divide(self, layers: nn.ModuleList, sharding: Sharding) -> list[nn.Module]:
        """Divide layers and vocabulary by the dimensions `tensor` and `expert`; return the parts with experts."""
        mesh = self.mesh
        experts = experts_of(self.module, layers) if mesh.expert.size() > 1 else {}
        adapted = {} if self.trains.adapter_rank is None else adapted_layers(layers)
        above = next(path for path, part in self.named_modules() if part is layers)
        for path, part in experts.items():
            names = divide_experts(part, mesh.expert, mesh.tensor, self.host, adapted=path in adapted)
            self._summed |= {f"{above}.{path}.{name}": mesh.expert for name in names}
        if sharding.tensor > 1:
            split = split_styles(self.name, self.module, layers, sharding.tensor, adapted=adapted, experts=experts)
            split_layers(layers, mesh.tensor, split)
            self._summed |= {f"{above}.{path}": mesh.tensor for path in split.copied}
            self._word_shard = split_vocabulary(
                self.name,
                self.module,
                mesh.tensor,
                self._rows,
                self.words or None,
                embeds=self.stage is None or self.stage.first,
            )
        return list(experts.values())

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
        return self.gathered.module

    @property
    @override
    def rollout_value_head(self) -> ValueNetwork | None:
        return self.gathered.value_head

    def owned(self) -> list[nn.Parameter]:
        """Return this rank's slices as plain tensors, for optimizers that work element by element."""
        return self._owned

    @property
    def stages(self) -> int:
        """Number of stages of the pipeline."""
        return 1 if self.stage is None else self.stage.stages

    @property
    def first_rank(self) -> int:
        """The first rank of the stage of this rank."""
        ranks = self.mesh.pipeline
        return 0 if ranks is None else first_rank(ranks, ranks.get_local_rank())

    def check_trained(self) -> None:
        """Check that each stage has a weight that trains; see `check_trained_stages` for errors."""
        trained = [placed.stages for placed in self.placed.values() if placed.trained]
        check_trained_stages(self.name, self.trains, trained, self.stages)

    @property
    def later_stages(self) -> int:
        """Number of stages after that of this rank."""
        return 0 if self.stage is None else self.stages - 1 - self.stage.index

    def like(self, own: Tensor, place: int) -> DTensor:
        """Wrap a tensor shaped like this rank's slice of `owned()[place]` as a shard of the full tensor."""
        return from_slice(own, list(self.sharded.values())[place])

    @override
    def counts(self) -> tuple[int, int]:
        return self._counts

    @property
    @override
    def words(self) -> int:
        return self._words

    @override
    def limited(self, head: LMHead) -> LMHead:
        # A stage before the last one has no weight of the head, and computes no results.
        return super().limited(head) if self.stage is None or self.stage.last else head

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
        return replace(passes, layouts=tuple(map(self._divided, passes.layouts)))

    def _divided(self, layout: Layout) -> Layout:
        """Return the layout with the rows of this rank, if ranks divide the rows of a pass."""
        context = self.mesh.context
        return layout if context is None else layout.divided(context.size(), context.get_local_rank())

    def _hidden(self, moved: SequenceSample, layout: Layout) -> Tensor:
        if layout.pieces.any():
            return self._hidden_of_stage(moved, layout)
        # All ranks must call the layers together. One without tokens computes a single token, and drops it.
        token = moved.with_data({TOKENS: moved[TOKENS].new_zeros(1)}, lengths=Lengths.of([[1]]))
        return self._hidden_of_stage(token, self._divided(Layout.plain(token.lengths[TOKENS])))[:0]

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
        return RowsOfRank(layout.own, layout.rows, predicted_T, partial(summed, group=context.get_group()))

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

    def reduce_gradients(self, wanted: bool) -> None:
        """Set whether `differentiate` sums gradients over the ranks, or keeps them for a later call."""
        root: Any = self
        root.set_requires_gradient_sync(wanted)
        self._reduces = wanted

    def differentiate(self, hidden_RH: Tensor, loss: Tensor | None) -> None:
        """Add the gradient of `loss`, summed over the ranks, to the gradient of this rank's slices.

        See `Sharding.reduce_once` for when the sum over the ranks is computed. If `loss` is None or does not reach the
        layers, this rank contributes a zero gradient.
        """
        # The backward pass also starts from the hidden states, with a gradient of 0: every rank then passes through all
        # layers and reduces the same tensors, whichever outputs its loss uses (ADR 15).
        roots = [(hidden_RH, torch.zeros_like(hidden_RH))]
        if loss is not None and loss.requires_grad:
            roots.append((loss, torch.ones_like(loss)))
        received = None
        if self.stage is not None:
            received, own_RH = self.stage.begun()
            if not self.stage.last:
                roots = [(own_RH, self.stage.receive_gradient(own_RH).to(own_RH.dtype))]
        hooks = [self._listen(name) for name in self._heads if name in self.sharded]
        try:
            torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
        finally:
            for hook in hooks:
                hook.remove()
        if self.stage is not None:
            self.stage.return_gradient(received)
        self._unreduced = not self._reduces

    def _listen(self, name: str) -> Any:
        """Register a hook that records whether the gradient reaches a head's weight. The weight must be gathered."""
        return self.get_parameter(name).register_post_accumulate_grad_hook(lambda _: self._reached.add(name))

    def forget_gradients(self) -> None:
        """Discard all gradients.

        Raises:
            RuntimeError: an earlier call failed between its first and its last micro-batch, and FSDP keeps its
                gradients.
        """
        if self._unreduced:
            raise RuntimeError(f"models.{self.name}: gradients of a training step that failed are left. Load it again.")
        self._reached.clear()
        if self.stage is not None:
            self.stage.forget()
        for p, own in zip(self.sharded.values(), self._owned, strict=True):
            p.grad = own.grad = None

    def take_gradients(self) -> None:
        """Move the accumulated gradients to `owned`. A head that no rank's loss reached gets no gradient."""
        reached = [float(name in self._reached) for name in self._heads]
        counts = dict(zip(self._heads, self.host.sums(reached), strict=True)) if self._heads else {}
        for (name, p), own in zip(self.sharded.items(), self._owned, strict=True):
            if p.grad is not None and counts.get(name, 1):
                gradient = p.grad.to_local()
                if name in self._summed:
                    gradient = self.mesh.sum(gradient, self._summed[name]).to(own.device)
                if len(self.placed[name].stages) > 1:
                    assert self.stage is not None
                    gradient = self.stage.added_to_other_end(gradient.to(self.device)).to(own.device)
                own.grad = gradient
            p.grad = None
        if self.stage is not None:
            self.stage.settle()

    def gradient_norm(self) -> Tensor:
        """Return the norm of the whole gradient, the same on every rank."""
        tensor = self.mesh.tensor.size()
        ranks = self.mesh.shard.size() * tensor
        squares = [torch.zeros((), device=self.device)]
        for (name, p), own in zip(self.sharded.items(), self._owned, strict=True):
            if own.grad is not None:
                # Ranks that compute layers together have some weights in full, and the sum counts these several times.
                placed = zip(p.device_mesh.shape, p.placements, strict=True)
                slices = math.prod(n for n, placement in placed if not placement.is_replicate())
                copies = ranks // slices * len(self.placed[name].stages)
                squares.append(own.grad.norm().square().to(self.device) / copies)
        total = self.mesh.sum(torch.stack(squares).sum(), self.mesh.shard)
        total = total if tensor == 1 else self.mesh.sum(total, self.mesh.tensor)
        return (total if self.mesh.pipeline is None else self.mesh.sum(total, self.mesh.pipeline)).sqrt()

    @override
    def nonfinite_weight(self) -> str | None:
        own = next((name for name, p in self.sharded.items() if not bool(p.to_local().isfinite().all())), None)
        name = next((name for name in self.host.gather(own) if name is not None), None)
        return None if name is None else name.removeprefix("module.")

    def part(self, name: str, own: DTensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor that is divided as a weight is, such as its moments, as this rank sees it.

        Args:
            name: name of the weight in `placed`.
            own: this rank's shard; None if the weight is on other stages.
            dtype: dtype of the tensor; None means that of the weight.
        """
        if self.mesh.pipeline is None:
            assert own is not None
            return own
        placed, stage = self.placed[name], self.mesh.pipeline.get_local_rank()
        shard = own if stage == placed.stages[0] else None
        return PartOfStage.of(placed.like.to(dtype), shard, placed.stages[0], self.mesh.pipeline)

    def weight(self, name: str) -> Tensor:
        """Return a weight as this rank sees it; `whole` gathers it."""
        own: Any = self.sharded.get(name)
        return self.part(name, None if own is None else own.detach())

    def full(self, name: str) -> Tensor:
        """Return a full weight on the device of every rank; collective."""
        return whole(self.weight(name))

    @override
    def requires_grad_(self, requires_grad: bool = True) -> Self:
        self.placed = {name: replace(placed, trained=requires_grad) for name, placed in self.placed.items()}
        return super().requires_grad_(requires_grad)

    @override
    def module_state(self, *, fixed: bool) -> dict[str, Tensor]:
        own = super().module_state(fixed=fixed)
        if self.stage is None:
            return own
        state = {}
        for name in self.gathered.module.state_dict():
            of = self.names.get(f"module.{name}")
            if of is None and name in own:  # a buffer
                state[name] = own[name]
            elif of is not None and self.placed[of].trained != fixed:
                state[name] = self.weight(of)
        return state

    @override
    def value_head_state(self) -> dict[str, Tensor]:
        if self.stage is None or self.gathered.value_head is None:
            return super().value_head_state()
        return {name: self.weight(f"{VALUE_HEAD}{name}") for name in self.gathered.value_head.state_dict()}

    def base_weights(self) -> dict[str, Tensor]:
        """Return tensors like the weights that a saved folder has, without those of adapters, and the buffers.

        They are equal objects for tied weights. Only buffers have values.
        """
        copy, buffers = self.gathered, dict(self.named_buffers())
        likes: dict[int, Tensor] = {id(p): self.placed[name].like for name, p in copy.named_parameters()}
        likes |= {id(x): buffers[name] for name, x in copy.named_buffers()}
        return {name: likes[id(x)] for name, x in self.trains.base_weights(copy.module).items()}

    def saves(self, x: Tensor) -> bool:
        """Return whether the stage of this rank writes a weight into saved folders; tied embeddings are on two."""
        name = next((name for name, p in self.sharded.items() if p is x), None)
        return name is None or self.stage is None or self.placed[name].stages[0] == self.stage.index

    def full_weights(self) -> dict[str, Tensor]:
        """Return all weights in full, and the buffers, by the names of `named_weights`; collective."""
        own = named_weights(self.module, self.value_head)
        return {name: own[name] if of is None else self.full(of) for name, of in self._all_names()}

    def shards(self) -> dict[str, Tensor]:
        """Return all weights and buffers of the model as this rank sees them, by the names of `named_weights`."""
        own = named_weights(self.module, None)
        return {
            name: own[name] if of is None else self.weight(of)
            for name, of in self._all_names()
            if not name.startswith(VALUE_HEAD)
        }

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of all weights and buffers, by the names of `named_weights`."""
        own = named_weights(self.module, self.value_head)
        return {name: own[name].shape if of is None else self.placed[of].like.shape for name, of in self._all_names()}

    def _all_names(self) -> list[tuple[str, str | None]]:
        """Return all names of `named_weights`, each with the name in `placed`; None for a buffer."""
        names = named_weights(self.gathered.module, self.gathered.value_head)
        return [(name, self.names.get(name if name.startswith(VALUE_HEAD) else f"module.{name}")) for name in names]

    def gather(self, device: torch.device | None, names: Collection[str] | None = None) -> GatheredCopy:
        """Gather the weights with these names, or all, on `device`. With None, the rank only participates."""
        wanted = ((name, self.full(name)) for name in self.placed if names is None or name in names)
        self.gathered.fill(wanted, dict(self.named_buffers()), device)
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
        """See `Lender`."""
        return not self.host.most(int(not own))

    def gather_outer(self) -> None:
        """See `Lender`."""
        layers = set(self.gathered.names(read_stack(self.gathered.module).layers))
        self.gather(self.device, self.placed.keys() - layers)

    @contextmanager
    def lend(self, layer: nn.Module) -> Iterator[None]:
        """See `Lender`."""
        names = self.gathered.names(layer)
        self.gather(self.device, names)
        try:
            yield
        finally:
            self.gathered.empty(names)


def _placed(p: Tensor, stages: Sequence[int]) -> Placed:
    return Placed(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad, stages)


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

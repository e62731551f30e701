"""`ShardedNetwork`: FSDP2 over the mesh of ranks, tensor parallelism within layers, and full copies for rollouts.

A rank stores a slice of every weight and of its optimizer state. A layer is gathered only while it computes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
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
from realign.engines.distributed.expert_parallel import divide_experts, experts_of
from realign.engines.distributed.mesh import Mesh
from realign.engines.distributed.sharding import Sharding, from_slice, slices_of, whole
from realign.engines.distributed.tensor_parallel import split_layers, split_vocabulary
from realign.engines.files.unread import Unread
from realign.engines.host import Host
from realign.engines.network.branches import read_stack
from realign.engines.network.heads import read_body
from realign.engines.network.kernels import CONTEXT
from realign.engines.network.network import Network
from realign.engines.network.output import RowsOfRank, ScalarHead
from realign.engines.network.passes import Layout, Passes, rewrites_rope
from realign.engines.network.probe import TOLERANCE, probe_divided
from realign.engines.network.settings import NetworkSettings
from realign.engines.network.trains import adapted_layers
from realign.engines.network.value_head import ValueNetwork
from realign.engines.sampling.compiled.fusion import Fusion
from realign.errors import ConfigError
from realign.functional.logprobs import LMHead, WordShard

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
        layers = read_stack(module).layers
        self.mesh = Mesh.of(name, sharding, self.device, self.host)
        self._check_context(module if probed is None else probed)
        # Before the modules are sharded: this is an ordinary copy of their classes, without memory.
        self.gathered = GatheredCopy(module, self.value_head)
        unread = self._set_aside()
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
        # A loss may use any of the heads or none, so their gradients are tracked apart from those of the trunk.
        trunk = {id(p) for p in read_body(module).parameters()}
        self._heads = [name for name, p in self.sharded.items() if id(p) not in trunk and p.requires_grad]
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
        if rewrites_rope(probed):
            raise ConfigError(
                f"{key}: {family} changes its rotary positions for the longest sequence. Remove this key."
            )
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

    def _divide(self, layers: nn.ModuleList, sharding: Sharding) -> list[nn.Module]:
        """Divide layers and vocabulary by the dimensions `tensor` and `expert`; return the parts with experts."""
        mesh, divides = self.mesh, sharding.expert > 1
        key = f"models.{self.name}.sharding." + (
            f"expert={sharding.expert}" if divides else f"tensor={sharding.tensor}"
        )
        experts = experts_of(self.module, layers) if mesh.expert.size() > 1 else {}
        if divides and not experts:
            family = repr(self.module.config.model_type)
            raise ConfigError(f"{key}: transformers has no expert plan for model family {family}. Remove this key.")
        adapted = {} if self.trains.adapter_rank is None else adapted_layers(layers)
        above = next(path for path, part in self.named_modules() if part is layers)
        for path, part in experts.items():
            names = divide_experts(key, part, mesh.expert, mesh.tensor, self.host, adapted=path in adapted)
            self._summed |= {f"{above}.{path}.{name}": mesh.expert for name in names}
        if sharding.tensor > 1:
            copied = split_layers(self.name, self.module, layers, mesh.tensor, adapted=adapted, experts=experts)
            self._summed |= {f"{above}.{path}": mesh.tensor for path in copied}
            self._word_shard = split_vocabulary(self.name, self.module, mesh.tensor, self.words or None)
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
        for name, weight in unread.items():
            like: Any = self.get_parameter(name)
            own = weight.read(slices_of(like))
            digests[name] = self.host.digest(own)
            part = nn.Parameter(from_slice(own.to(self.device), like), like.requires_grad)
            for module, attribute in places[id(like)]:  # several for tied weights
                setattr(module, attribute, part)
            # Reads a slice that this rank doesn't keep: its neighbor reads it too, and must find the same bytes.
            expected[name] = self.host.digest(weight.read(slices_of(like, self.mesh.after(like))))
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

    def like(self, own: Tensor, place: int) -> DTensor:
        """Wrap a tensor shaped like this rank's slice of `owned()[place]` as a shard of the full tensor."""
        return from_slice(own, list(self.sharded.values())[place])

    @override
    def read_head(self, *, dropout: bool) -> LMHead | ScalarHead:
        head = super().read_head(dropout=dropout)
        if self._word_shard is None or not isinstance(head, LMHead):
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
            return super()._hidden(moved, layout)
        # All ranks must call the layers together. One without tokens computes a single token, and drops it.
        token = moved.with_data({TOKENS: moved[TOKENS].new_zeros(1)}, lengths=Lengths.of([[1]]))
        return super()._hidden(token, self._divided(Layout.plain(token.lengths[TOKENS])))[:0]

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
        hooks = [self._listen(name) for name in self._heads]
        try:
            if loss is None or not loss.requires_grad:
                torch.autograd.backward([hidden_RH], [torch.zeros_like(hidden_RH)])
            else:
                torch.autograd.backward([hidden_RH, loss], [torch.zeros_like(hidden_RH), torch.ones_like(loss)])
        finally:
            for hook in hooks:
                hook.remove()
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
        for p, own in zip(self.sharded.values(), self._owned, strict=True):
            p.grad = own.grad = None

    def take_gradients(self) -> None:
        """Move the accumulated gradients to `owned`. A head that no rank's loss reached gets no gradient."""
        reached = [float(name in self._reached) for name in self._heads]
        counts = dict(zip(self._heads, self.host.sums(reached), strict=True)) if self._heads else {}
        for (name, p), own in zip(self.sharded.items(), self._owned, strict=True):
            if p.grad is not None and counts.get(name, 1):
                gradient = p.grad.to_local()
                own.grad = (
                    self.mesh.sum(gradient, self._summed[name]).to(own.device) if name in self._summed else gradient
                )
            p.grad = None

    def gradient_norm(self) -> Tensor:
        """Return the norm of the whole gradient, the same on every rank."""
        tensor = self.mesh.tensor.size()
        ranks = self.mesh.shard.size() * tensor
        squares = [torch.zeros((), device=self.device)]
        for p, own in zip(self.sharded.values(), self._owned, strict=True):
            if own.grad is not None:
                # Ranks that compute layers together have some weights in full, and the sum counts these several times.
                placed = zip(p.device_mesh.shape, p.placements, strict=True)
                slices = math.prod(n for n, placement in placed if not placement.is_replicate())
                squares.append(own.grad.norm().square().to(self.device) / (ranks // slices))
        total = self.mesh.sum(torch.stack(squares).sum(), self.mesh.shard)
        return (total if tensor == 1 else self.mesh.sum(total, self.mesh.tensor)).sqrt()

    @override
    def nonfinite_weight(self) -> str | None:
        own = next((name for name, p in self.sharded.items() if not bool(p.to_local().isfinite().all())), None)
        name = next((name for name in self.host.gather(own) if name is not None), None)
        return None if name is None else name.removeprefix("module.")

    def gather(self, device: torch.device | None, names: Collection[str] | None = None) -> GatheredCopy:
        """Gather the weights with these names, or all, on `device`. With None, the rank only participates."""
        wanted = {name: p for name, p in self.sharded.items() if names is None or name in names}
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
        self.gather(self.device, self.sharded.keys() - layers)

    @contextmanager
    def lend(self, layer: nn.Module) -> Iterator[None]:
        """See `Lender`."""
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
        self.current = False

    def names(self, part: nn.Module) -> list[str]:
        """Return the names of the weights of a part of the copy."""
        own = {id(p): name for name, p in self._all.named_parameters()}
        return [own[id(p)] for p in part.parameters()]

    def outdate(self) -> None:
        """Mark the gathered weights as outdated, after the weights have changed."""
        self.current = False

    @torch.no_grad()
    def fill(self, sharded: Mapping[str, Tensor], buffers: Mapping[str, Tensor], device: torch.device | None) -> None:
        """Gather the current weights on `device`, one by one; collective. With None, the rank only participates."""
        self.outdate()
        own = dict(self._all.named_parameters())
        # All ranks gather in the same order. One by one: if `device` is the host, the accelerator never holds more than
        # one full weight.
        for name, part in sharded.items():
            x = whole(part.detach())
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

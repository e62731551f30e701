"""Tensor parallelism: ranks that compute a model together, each with some heads and neurons of every layer.

Linear layers are split by the plan that transformers has for the model family, and their LoRA adapters with them. The
rows of the embeddings and of the language-model head are divided by words, so that no rank computes all logits.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.func import functional_call

from realign.errors import ConfigError
from realign.functional.logprobs import WordShard

logger = logging.getLogger(__name__)

COLUMNS: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
}
"""The ways to split a linear layer by its outputs, by their names in a plan of transformers."""
ROWS: dict[str, Callable[[], ParallelStyle]] = {
    "rowwise": RowwiseParallel,
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
}
"""The ways to split a linear layer by its inputs."""

COPIED = "replicated_with_grad_allreduce"
"""Name, in a plan, of a part that every rank stores in full and applies to its own heads."""


class _SplitStyles(NamedTuple):
    """How to split the linear layers of a model, by name in the list of its layers."""

    styles: dict[str, ParallelStyle]
    copied: set[str]
    """Replicated parameters whose gradient is summed over ranks."""
    columns: dict[str, str]
    """The linear layers that are split by outputs, each with the part of a layer that contains it."""
    dropouts: list[nn.Module]
    """Dropout of adapters whose input is split."""


def split_styles(
    role: str,
    module: Any,
    layers: nn.ModuleList,
    ranks: int,
    *,
    adapted: Mapping[str, Any],
    experts: Collection[str],
) -> _SplitStyles:
    """Return how to split linear layers by the plan that transformers has for the model family.

    Norms and scalar heads are replicated on every rank. Packed attention runs on the local heads only.

    Args:
        role: role of the model, for messages.
        module: the model.
        layers: its layers.
        ranks: number of ranks that compute a layer together.
        adapted: the layers with LoRA adapters, by name in `layers`.
        experts: names in `layers` of the parts that contain experts, which are divided as wholes.

    Raises:
        ConfigError: the family has no plan, the plan has an unsupported style, or the heads do not divide evenly.
    """
    key, family = f"models.{role}.sharding.tensor={ranks}", repr(module.config.model_type)
    plan = getattr(module.config, "base_model_tp_plan", None)
    if not plan:
        raise ConfigError(
            f"{key}: transformers has no tensor-parallel plan for model family {family}. Remove this key."
        )
    _check_divides(key, module.config, ranks)
    inside = tuple(f"{name}." for name in (*adapted, *experts))
    parts: dict[str, object] = {**dict(layers.named_parameters()), **dict(layers.named_modules())}
    split = _SplitStyles({}, set(), {}, [])
    for name, part in parts.items():
        if name in experts or name.startswith(inside):
            continue
        wanted = next((style for path, style in plan.items() if matches(path, name)), None)
        adapters = adapted.get(name)
        computes: Any = part if adapters is None else adapters.get_base_layer()
        linear = isinstance(computes, nn.Linear)
        if linear and next(computes.parameters(), None) is None:
            continue  # on another stage of the pipeline
        if wanted == COPIED:
            split.copied.update(path for path in dict(layers.named_parameters()) if f"{path}.".startswith(f"{name}."))
        elif wanted in COLUMNS and linear:
            # An adapter A reads what the layer reads, and B writes what it writes: only one of them is split. The ranks
            # share the values between A and B, so the gradient of the other one is complete on every rank.
            added = [] if adapters is None else [f"{name}.lora_B.{adapter}" for adapter in adapters.lora_B]
            base = name if adapters is None else f"{name}.base_layer"
            split.styles.update({path: COLUMNS[wanted]() for path in (base, *added)})
            split.columns[base] = name.rpartition(".")[0]
        elif wanted in ROWS and linear:
            added = [] if adapters is None else [f"{name}.lora_A.{adapter}" for adapter in adapters.lora_A]
            base = name if adapters is None else f"{name}.base_layer"
            split.styles.update({path: ROWS[wanted]() for path in (base, *added)})
            if adapters is not None and wanted == "rowwise":
                split.dropouts.extend(adapters.lora_dropout.values())
        elif wanted is not None or linear:
            style = "no style" if wanted is None else f"style {wanted!r}"
            raise ConfigError(
                f"{key}: the plan of model family {family} has {style} for {name!r} ({type(part).__name__}). "
                f"Supported: {', '.join((*COLUMNS, *ROWS))} for plain linear layers, and {COPIED}. Remove this key."
            )
    return split


def split_layers(layers: nn.ModuleList, mesh: DeviceMesh, split: _SplitStyles) -> None:
    """Split linear layers over the ranks of `mesh`."""
    parallelize_module(layers, mesh, split.styles)
    shared = _SharedInput(mesh)
    for name in split.columns:
        layers.get_submodule(name).register_forward_pre_hook(shared, prepend=True)
    for name in set(split.columns.values()):
        layers.get_submodule(name).register_forward_hook(shared.forget)
    for dropout in split.dropouts:
        if isinstance(dropout, nn.Dropout):
            _draw_whole_masks(dropout, mesh)


def _draw_whole_masks(dropout: Any, mesh: DeviceMesh) -> None:
    """Let dropout on this rank's features use its part of the mask that one process draws.

    All ranks draw the same numbers, so a mask of its own features would be that of the features of the other ranks.
    """
    ranks, rank = mesh.size(), mesh.get_local_rank()

    def forward(x: Tensor) -> Tensor:
        if not dropout.training:
            return x
        ones = x.new_ones(*x.shape[:-1], ranks * x.shape[-1])
        return x * nn.functional.dropout(ones, dropout.p).chunk(ranks, -1)[rank]

    dropout.forward = forward


class _SharedInput:
    """Lets linear layers that read the same tensor sum their parts of its gradient once over the ranks.

    Each of them would otherwise wrap the tensor in a `DTensor` of its own, whose gradient is summed on its own.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._pair: tuple[Tensor, DTensor] | None = None

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x: Tensor = inputs[0]
        if self._pair is None or self._pair[0] is not x:
            self._pair = (x, DTensor.from_local(x, self._mesh, [Replicate()], run_check=False))
        return (self._pair[1], *inputs[1:])

    def forget(self, part: nn.Module, inputs: object, output: object) -> None:
        """Free the tensor after the part of a layer that contains the linear layers."""
        self._pair = None


def matches(path: str, name: str) -> bool:
    """Return whether a plan path, such as `layers.*.mlp.up_proj`, matches a part's name in the list of layers."""
    pattern = re.escape(path.partition(".")[2]).replace(r"\*", r"\d+")
    return re.fullmatch(pattern, name) is not None


def _check_divides(key: str, config: Any, ranks: int) -> None:
    heads = {
        name: getattr(config, name, None)
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    }
    for name, n in heads.items():
        if n is not None and n % ranks:
            raise ConfigError(f"{key}: must divide {name}={n} of the model")


def split_vocabulary(
    role: str, module: Any, mesh: DeviceMesh, total: int, words: int | None, *, embeds: bool
) -> WordShard | None:
    """Divide the rows of the embeddings, and of the language-model head if there is one, over the ranks of `mesh`.

    Args:
        role: role of the model, for messages.
        module: the model.
        mesh: the ranks that compute a layer together.
        total: number of rows of the embeddings.
        words: number of tokens in the softmax; None if the model has a scalar head.
        embeds: whether these ranks look up embeddings, and not another stage of a pipeline.

    Returns:
        This rank's rows; None if the ranks do not divide the vocabulary evenly. Every rank then has all rows.
    """
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    ranks = mesh.size()
    rows = total // ranks
    start = rows * mesh.get_local_rank()
    # The last rank must have a word, also of a softmax over the first words only.
    if total % ranks or (words is not None and words <= total - rows):
        logger.warning(
            "models.%s.sharding.tensor=%d: every rank has all embeddings, since %d tokens cannot be divided evenly.",
            role,
            ranks,
            total if words is None else words,
        )
        return None
    divided: dict[int, nn.Parameter] = {}  # tied weights stay one parameter
    for part in (embedding, *([] if head is None else [head])):
        for name, p in part.named_parameters(recurse=False):
            if id(p) not in divided:
                divided[id(p)] = divide(p, mesh)
            setattr(part, name, divided[id(p)])
    group = mesh.get_group()
    shard = WordShard(
        start,
        rows,
        total,
        gather=lambda x: _gather(x, group).view(ranks, *x.shape),
        sum=lambda x: _all_reduce(x, group),
        complete=lambda x: _AllRows.apply(x, mesh),
    )
    if embeds:
        _look_up_own_rows(embedding, shard)
    return shard


def divide(p: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """Return this rank's part of the first dimension of a parameter that is complete on every rank."""
    return nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=None), p.requires_grad)


def without_weights(part: Any) -> Any:
    """Return a copy of a module whose parameters are empty."""
    memo = {id(p): nn.Parameter(torch.empty(0, dtype=p.dtype), requires_grad=False) for p in part.parameters()}
    return copy.deepcopy(part, memo)


def _look_up_own_rows(embedding: Any, shard: WordShard) -> None:
    """Let embeddings look up the tokens of this rank, and sum the results over the ranks."""
    # A copy computes, since the embedding itself has a sharded weight and no kernel for it.
    local = without_weights(embedding)
    if local.padding_idx is not None:  # the row that receives no gradient
        own, row = shard.local(torch.tensor(local.padding_idx), shard.rows)
        local.padding_idx = int(row) if own else None

    def forward(ids: Tensor) -> Tensor:
        own, rows = shard.local(ids, shard.rows)
        vectors: Tensor = functional_call(local, {"weight": embedding.weight.to_local()}, (rows,))
        out: Tensor = _Sum.apply(vectors.masked_fill(~own[..., None], 0), shard.sum)
        return out

    embedding.forward = forward


def _gather(x: Tensor, group: Any) -> Tensor:
    """Return the tensors of all ranks, concatenated along the first dimension."""
    out = x.new_empty(dist.get_world_size(group) * len(x), *x.shape[1:])
    dist.all_gather_single(out, x.contiguous(), group=group)
    return out


def _all_reduce(x: Tensor, group: Any) -> Tensor:
    x = x.contiguous()
    dist.all_reduce(x, group=group)
    return x


class _Sum(torch.autograd.Function):
    """The sum over ranks that compute the same from there on: the gradient of the sum is that of each part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
        return total(x.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _AllRows(torch.autograd.Function):
    """The rows of all ranks, which compute the same from there on; the gradient is that of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.rows = slice(mesh.get_local_rank() * len(x), (mesh.get_local_rank() + 1) * len(x))
        return _gather(x, mesh.get_group())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][ctx.rows], None

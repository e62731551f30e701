"""Expert parallelism: ranks that each have some experts of every layer, and exchange the rows that these compute.

Every rank routes its own rows. Each pair of a row and a chosen expert goes to the rank that has the expert, which
computes it and sends the result back; the rank of the row then weights and adds the results. Ranks that compute layers
together have the same rows, and each of them sends a part of them.

Shapes: R rows of a rank's pass, K experts per row, N pairs that a rank computes, E experts of a layer, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call

from realign.engines.distributed.tensor_parallel import divide, matches, without_weights
from realign.errors import ConfigError
from realign.models.host import Host
from realign.models.network.trains import adapted_layers

_WHOLE_EXPERTS = "grouped_gemm"
"""Name, in an expert plan of transformers, of a weight [E, ...] of experts that is divided by expert."""


def experts_of(module: Any, layers: nn.ModuleList) -> dict[str, Any]:
    """Return the parts of layers that contain experts, by name in `layers`, by the plan of transformers."""
    plan = getattr(module.config, "base_model_ep_plan", None) or {}
    owners = {path.rpartition(".")[0] for path, style in plan.items() if style == _WHOLE_EXPERTS}
    return {name: part for name, part in layers.named_modules() if any(matches(path, name) for path in owners)}


def check_experts(key: str, total: int, ranks: int, *, adapted: bool) -> None:
    """Check that ranks can divide the experts of a layer.

    Args:
        key: the setting that divides the experts, for messages.
        total: number of experts.
        ranks: number of ranks.
        adapted: whether the experts have LoRA adapters.

    Raises:
        ConfigError: they can't.
    """
    if total % ranks:
        raise ConfigError(f"{key}: {ranks} ranks divide the experts of a layer, but it has {total}.")
    if adapted and ranks == total:  # peft would take the weights of one expert for those of a plain layer
        raise ConfigError(f"{key}: LoRA needs at least two experts on each rank, but {ranks} ranks divide {total}.")


def divide_experts(experts: Any, ranks: DeviceMesh, tensor: DeviceMesh, host: Host, *, adapted: bool) -> list[str]:
    """Leave each rank its experts of a layer, and let the layer exchange rows with the other ranks.

    Args:
        experts: the part of a layer that contains the experts, which `check_experts` accepts.
        ranks: the ranks that divide them.
        tensor: those among them that compute the layer together.
        host: agrees on numbers of rows.
        adapted: whether the experts have LoRA adapters. Every rank has those of all experts.

    Returns:
        Names of parameters that every rank has in full, and whose gradient is summed over `ranks`.
    """
    total = experts.num_experts
    own = total // ranks.size()
    base = experts.get_base_layer() if adapted else experts
    for name, p in list(base.named_parameters(recurse=False)):
        setattr(base, name, divide(p, ranks))
    # A copy computes, since the experts themselves have sharded weights and no kernel for them.
    local = without_weights(experts)
    for part in [*adapted_layers(local).values(), local.get_base_layer()] if adapted else [local]:
        part.num_experts = own
    first = own * ranks.get_local_rank()
    exchange = _Exchange(ranks, tensor, host)

    def forward(hidden_RH: Tensor, chosen_RK: Tensor, scores_RK: Tensor) -> Tensor:
        # Adapters are off while the base model is the reference; see `Trained.without`.
        plain = adapted and experts.disable_adapters
        given, computing = (base, local.get_base_layer()) if plain else (experts, local)
        weights = {
            name: _own_experts(name, p, total, slice(first, first + own)) for name, p in given.named_parameters()
        }

        def compute(rows_NH: Tensor, expert_N: Tensor) -> Tensor:
            once_N1 = torch.ones_like(rows_NH[:, :1])
            results_NH: Tensor = functional_call(computing, weights, (rows_NH, expert_N[:, None], once_N1))
            return results_NH

        dtype = next(iter(base.parameters())).dtype
        return exchange(compute, own, hidden_RH, chosen_RK, scores_RK, dtype)

    experts.forward = forward
    return [name for name, _ in experts.named_parameters() if _is_adapter(name)]


def _is_adapter(name: str) -> bool:
    return bool({"lora_A", "lora_B"} & set(name.split(".")))


def _own_experts(name: str, p: Any, experts: int, own: slice) -> Tensor:
    """Return the weights of this rank's experts in a parameter."""
    if not _is_adapter(name):
        local: Tensor = p.to_local()
        return local
    # peft joins the adapters A of all experts as [experts * rank, inputs], and B as [outputs, rank * experts].
    if "lora_A" in name.split("."):
        return p.view(experts, -1, p.shape[1])[own].flatten(0, 1)
    return p.view(len(p), -1, experts)[..., own].flatten(1)


class _Exchange:
    """The exchange of rows between the ranks that divide the experts of a layer."""

    def __init__(self, ranks: DeviceMesh, tensor: DeviceMesh, host: Host) -> None:
        self._ranks, self._tensor, self._host = ranks, tensor, host

    def __call__(
        self,
        compute: Callable[[Tensor, Tensor], Tensor],
        own: int,
        hidden_RH: Tensor,
        chosen_RK: Tensor,
        scores_RK: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the weighted sum of the results of the experts of each row.

        Args:
            compute: returns the results [N, H] of rows [N, H] and their experts [N], counted from this rank's first.
            own: number of experts of this rank.
            hidden_RH: the rows.
            chosen_RK: their experts.
            scores_RK: weights of the results.
            dtype: dtype in which the experts multiply, and rows travel.
        """
        rows = len(hidden_RH)
        if self._tensor.size() > 1:
            hidden_RH, scores_RK = (_Part.apply(x, self._tensor) for x in (hidden_RH, scores_RK))
            chosen_RK = _part(chosen_RK, self._tensor)
        group, ranks = self._ranks.get_group(), self._ranks.size()
        expert_N = chosen_RK.flatten()
        order_N = expert_N.argsort(stable=True)  # a rank has consecutive experts, so this also sorts by rank
        counts = expert_N.new_zeros(ranks * own).index_add_(0, expert_N, torch.ones_like(expert_N))
        sent = counts.view(ranks, own)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        there, here = self._host.rows_of_ranks(sent, received, len(expert_N))
        rows_NH = _Travel.apply(hidden_RH.to(dtype)[order_N // chosen_RK.shape[1]], there, here, group)
        index_N = torch.arange(own, device=received.device).repeat(ranks)
        index_N = index_N.repeat_interleave(received.flatten(), output_size=sum(here))
        if len(rows_NH):
            results_NH = compute(rows_NH, index_N)
        else:  # the backward pass must reach the exchange on every rank: one row that counts nothing
            results_NH = compute(rows_NH.sum(0, keepdim=True), index_N.new_zeros(1))[:0]
        back_NH = _Travel.apply(results_NH, here, there, group)
        results_RKH = back_NH[order_N.argsort()].view(*chosen_RK.shape, back_NH.shape[1])
        out_RH = (results_RKH * scores_RK[..., None]).sum(1).to(hidden_RH.dtype)
        return _Joined.apply(out_RH, self._tensor, rows) if self._tensor.size() > 1 else out_RH


def _exchange(x: Tensor, there: Sequence[int], here: Sequence[int], group: Any) -> Tensor:
    out = x.new_empty(sum(here), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), list(here), list(there), group=group)
    return out


class _Travel(torch.autograd.Function):
    """Sends `there[i]` rows to rank i, and returns the rows from all ranks, `here[i]` from rank i."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Sequence[int], here: Sequence[int], group: Any) -> Tensor:
        ctx.way = (here, there, group)
        return _exchange(x, there, here, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradients[0], *ctx.way), None, None, None


def _part(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the rows of this rank, of rows that all ranks have."""
    each = -(-len(x) // mesh.size())
    return x[mesh.get_local_rank() * each :][:each]


def _gather_rows(x: Tensor, mesh: DeviceMesh, rows: int) -> Tensor:
    """Return the rows of all ranks, given those that `_part` returned to each."""
    each = -(-rows // mesh.size())
    padded = x.new_zeros(each, *x.shape[1:])  # the last ranks may have fewer rows
    padded[: len(x)] = x
    out = x.new_empty(each * mesh.size(), *x.shape[1:])
    dist.all_gather_single(out, padded, group=mesh.get_group())
    return out if rows == len(out) else out[:rows].clone()  # FSDP needs a tensor that is not a view for its hooks


class _Part(torch.autograd.Function):
    """The rows of this rank, of rows that all ranks have; each rank receives the gradient of all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh, ctx.rows = mesh, len(x)
        return _part(x, mesh)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _gather_rows(gradients[0], ctx.mesh, ctx.rows), None


class _Joined(torch.autograd.Function):
    """The rows of all ranks; all ranks have the same gradient, and each keeps that of its own rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, rows: int) -> Tensor:
        ctx.mesh = mesh
        return _gather_rows(x, mesh, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _part(gradients[0], ctx.mesh), None, None

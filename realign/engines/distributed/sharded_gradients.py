"""`ShardedGradients`: gradients of a sharded network, summed over the ranks and measured as one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from realign.engines.distributed.mesh import Mesh
from realign.engines.distributed.pipeline_parallel import Stage
from realign.engines.distributed.sharded_weights import ShardedWeights


class ShardedGradients:
    """The gradient of each weight in its shards. The methods are collectives: all ranks must call them."""

    def __init__(
        self,
        network: nn.Module,
        weights: ShardedWeights,
        mesh: Mesh,
        stage: Stage | None,
        heads: Sequence[str],
        summed: Mapping[str, DeviceMesh],
    ) -> None:
        """Compute gradients of `network`, which is the FSDP root.

        Args:
            network: the network.
            weights: its weights.
            mesh: the mesh of ranks.
            stage: the stage of this rank; None without a pipeline.
            heads: names of the weights of heads. A loss may use any of the heads or none, so their gradients are
                tracked apart from those of the trunk.
            summed: weights that ranks have in full and apply to different heads or experts: the gradient is the sum
                over these ranks.
        """
        self._root: Any = network
        self._weights, self._mesh, self._stage = weights, mesh, stage
        self._heads, self._summed = heads, summed
        self._reached: set[str] = set()
        self._reduces, self._unreduced = True, False

    def reduce(self, wanted: bool) -> None:
        """Set whether `differentiate` sums gradients over the ranks, or keeps them for a later call."""
        self._root.set_requires_gradient_sync(wanted)
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
        if self._stage is not None:
            received, own_RH = self._stage.oldest_pass()
            if not self._stage.last:
                roots = [(own_RH, self._stage.receive_gradient(own_RH).to(own_RH.dtype))]
        hooks = [self._listen(name) for name in self._heads if name in self._weights.sharded]
        try:
            torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
        finally:
            for hook in hooks:
                hook.remove()
        if self._stage is not None:
            self._stage.return_gradient(received)
        self._unreduced = not self._reduces

    def _listen(self, name: str) -> Any:
        """Register a hook that records whether the gradient reaches a head's weight. The weight must be gathered."""
        return self._root.get_parameter(name).register_post_accumulate_grad_hook(lambda _: self._reached.add(name))

    def forget(self) -> None:
        """Discard all gradients.

        Raises:
            RuntimeError: an earlier call failed between its first and its last micro-batch, and FSDP keeps its
                gradients.
        """
        if self._unreduced:
            raise RuntimeError(
                f"models.{self._root.name}: gradients of a training step that failed are left. Load it again."
            )
        self._reached.clear()
        if self._stage is not None:
            self._stage.forget()
        for p, own in zip(self._weights.sharded.values(), self._weights.own_parameters, strict=True):
            p.grad = own.grad = None

    def take(self) -> None:
        """Move the accumulated gradients to `own_parameters`. A head that no rank's loss reached gets no gradient."""
        reached = [float(name in self._reached) for name in self._heads]
        counts = dict(zip(self._heads, self._weights.host.sums(reached), strict=True)) if self._heads else {}
        for (name, p), own in zip(self._weights.sharded.items(), self._weights.own_parameters, strict=True):
            if p.grad is not None and counts.get(name, 1):
                gradient = p.grad.to_local()
                if name in self._summed:
                    gradient = self._mesh.sum(gradient, self._summed[name]).to(own.device)
                if len(self._weights.placed[name].stages) > 1:
                    assert self._stage is not None
                    gradient = self._stage.sum_of_both_ends(gradient.to(self._weights.device)).to(own.device)
                own.grad = gradient
            p.grad = None
        if self._stage is not None:
            self._stage.settle()

    def norm(self) -> Tensor:
        """Return the norm of the whole gradient, the same on every rank."""
        tensor = self._mesh.tensor.size()
        ranks = self._mesh.shard.size() * tensor
        squares = [torch.zeros((), device=self._weights.device)]
        for (name, p), own in zip(self._weights.sharded.items(), self._weights.own_parameters, strict=True):
            if own.grad is not None:
                # Ranks that compute layers together have some weights in full, and the sum counts these several times.
                placed = zip(p.device_mesh.shape, p.placements, strict=True)
                slices = math.prod(n for n, placement in placed if not placement.is_replicate())
                copies = ranks // slices * len(self._weights.placed[name].stages)
                squares.append(own.grad.norm().square().to(self._weights.device) / copies)
        total = self._mesh.sum(torch.stack(squares).sum(), self._mesh.shard)
        total = total if tensor == 1 else self._mesh.sum(total, self._mesh.tensor)
        return (total if self._mesh.pipeline is None else self._mesh.sum(total, self._mesh.pipeline)).sqrt()

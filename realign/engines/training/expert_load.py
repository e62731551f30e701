"""Load balancing of experts over whole optimizer steps: an auxiliary loss, routing biases, and metrics of the load.

The loss of a router with E experts is E * sum over experts e of f_e * P_e (arXiv:2101.03961). f_e is the number of
tokens that chose expert e, divided by the number of tokens N. P_e is the mean over tokens of the router probability.
The gradient flows through P_e only, which is a sum over tokens, so micro-batches add up if they all use the f_e of
the whole optimizer step.

Shapes: L routers, R rows of a pass, E experts per router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from realign.api.stats import Stats
from realign.engines.training.load_balancing import LoadBalancing
from realign.engines.training.stepper import single
from realign.errors import ConfigError
from realign.models.network.encoder_decoder import EncoderDecoder
from realign.models.network.passes import Layout
from realign.models.network.routers import Routed, Routers
from realign.models.network.unpacked import UnpackedModel

_SumOverRanks = Callable[[Tensor], Tensor]


class LoadBalancer:
    """Balances the experts of one model.

    Attributes:
        coef: weight of the auxiliary loss; 0 without one.
        bias_rate: change of the routing biases; 0 keeps them.
        routers: routers of the model; None if the model does not balance.
    """

    def __init__(self, name: str, module: Any, settings: LoadBalancing | None) -> None:
        """Find the routers of the model of role `name`.

        Raises:
            ConfigError: the model has no routers that can be balanced.
        """
        self._key = f"models.{name}.load_balancing"
        self.coef = 0.0 if settings is None else settings.coef
        self.bias_rate = 0.0 if settings is None else settings.bias_rate
        self.routers: Routers | None = None
        if settings is None:
            return
        try:
            self.routers = Routers(module)
        except ConfigError as error:
            raise ConfigError(f"{self._key}: {error} Remove load_balancing.") from error
        family = f"model family {module.config.model_type!r}"
        if self.coef and not self.routers.softmax:
            raise ConfigError(
                f"{self._key}.coef={self.coef:g}: {family} has routers that do not weight the top experts by a "
                f"softmax. Set {self._key}.coef=0."
            )
        if self.bias_rate and not self.routers.biases:
            raise ConfigError(
                f"{self._key}.bias_rate={self.bias_rate:g}: {family} has no routing biases. Remove bias_rate."
            )

    def check(self, unpacked: UnpackedModel | EncoderDecoder | None) -> None:
        """Raise ConfigError if the model balances and runs unpacked."""
        if self.routers is not None and unpacked is not None:
            raise ConfigError(f"{self._key}: requires a model that can run packed. {unpacked.reason}")

    def start(self, passes: int, count: Callable[[StepLoad], None], total: _SumOverRanks) -> StepLoad | None:
        """Start an optimizer step; return None if the model does not balance.

        Args:
            passes: number of passes of the step, over all ranks.
            count: runs all passes without gradient, each within `StepLoad.of`.
            total: sums a tensor over data-parallel ranks; collective.
        """
        if self.routers is None:
            return None
        if not self.coef or passes == 1:  # a single pass counts its own tokens
            return StepLoad(self.routers, self.coef, None)
        # Each pass multiplies its probabilities by the load of the whole step, so that micro-batches and ranks do not
        # change the loss. That load must be known before the first gradient, hence the passes that only count.
        first = StepLoad(self.routers, 0.0, None)
        with first.listening():
            count(first)
        return StepLoad(self.routers, self.coef, total(first.counts_LE))

    @torch.no_grad()
    def finish(self, load: StepLoad) -> None:
        """Change the routing biases after an optimizer step with this load."""
        if self.routers is None or not self.bias_rate:
            return
        # Only the sign counts (arXiv:2408.15664): the size of a step doesn't depend on how uneven the load is.
        below_LE = load.total_LE.mean(-1, keepdim=True) - load.total_LE
        for bias_E, change_E in zip(self.routers.biases, self.bias_rate * below_LE.sign(), strict=True):
            bias_E += change_E.to(bias_E)


class StepLoad:
    """Load of the experts in one optimizer step.

    Attributes:
        counts_LE: number of tokens that chose each expert, in the passes of this rank.
        probs_LE: sum of the router probabilities over the same tokens; 0 without a softmax.
        total_LE: the counts over all ranks; set by `metrics`.
    """

    def __init__(self, routers: Routers, coef: float, all_LE: Tensor | None) -> None:
        """Start with no pass.

        Args:
            routers: routers of the model.
            coef: weight of the auxiliary loss.
            all_LE: counts of the whole step on all ranks; None if they are those of the only pass.
        """
        self._routers = routers
        self._coef = coef
        self._all_LE = all_LE
        self._weight_R: Tensor | None = None
        self._adds = False
        self.counts_LE = torch.zeros(len(routers.modules), routers.experts, device=routers.device)
        self.probs_LE = torch.zeros_like(self.counts_LE)
        self.total_LE = self.counts_LE

    def listening(self) -> AbstractContextManager[None]:
        """Return a context for the passes of the step and their gradients."""
        return self._routers.listen(self._hear)

    def weigh(self, layout: Layout) -> None:
        """Expect the rows of this pass next, which layers recompute for its gradient."""
        self._weight_R = layout.tokens_per_row(self._routers.device) if layout.pieces.any() else None

    @contextmanager
    def of(self, layout: Layout) -> Iterator[None]:
        """Count the rows of a pass. Its gradient may be computed until the next pass starts, or after `weigh`."""
        self.weigh(layout)
        self._adds = True
        try:
            yield
        finally:
            self._adds = False  # layers that are recomputed for the gradient do not count again

    def _hear(self, router: int, routed: Routed) -> Routed:
        if (weight_R := self._weight_R) is None:  # a pass of other ranks, without tokens of this rank
            return routed
        # A row of a shared prompt counts once for each sequence that contains it (ADR 32).
        chosen = routed.chosen_RK.flatten()
        counts_E = torch.zeros_like(self.counts_LE[0])
        counts_E.index_add_(0, chosen, weight_R.repeat_interleave(self._routers.chosen))
        if self._adds:
            self.counts_LE[router] += counts_E
        if not self._routers.softmax:
            return routed
        probs_E = (routed.logits_RE.float().softmax(-1) * weight_R[:, None]).sum(0)
        if self._adds:
            self.probs_LE[router] += probs_E.detach()
        if not self._coef or not probs_E.requires_grad:
            return routed
        all_E = counts_E if self._all_LE is None else self._all_LE[router]
        # The mean over layers of one loss per layer. Counts pooled over layers would hide opposite imbalances (ADR 32).
        loss = self._coef / len(self.counts_LE) * self._loss(all_E, probs_E)
        scores_RK: Tensor = _WithLoss.apply(routed.scores_RK, loss)
        return replace(routed, scores_RK=scores_RK)

    def _loss(self, counts_E: Tensor, probs_E: Tensor) -> Tensor:
        """Return the loss of each router; the last dimension of the arguments is E."""
        tokens = counts_E.sum(-1, keepdim=True) / self._routers.chosen
        return self._routers.experts * (counts_E / tokens * probs_E / tokens).sum(-1)

    def metrics(self, total: _SumOverRanks) -> Stats:
        """Return the metrics of the step, over all ranks; `total` sums a tensor over them."""
        counts_LE, probs_LE = total(torch.stack([self.counts_LE, self.probs_LE]))
        self.total_LE = counts_LE
        mean_L1 = counts_LE.mean(-1, keepdim=True)
        load_LE = counts_LE / mean_L1
        stats: Stats = {
            "expert_load_max": single(float(load_LE.max())),
            "expert_load_min": single(float(load_LE.min())),
            "idle_experts": single(float((counts_LE == 0).float().mean())),
        }
        if self._routers.softmax:
            stats["load_balancing_loss"] = single(float(self._loss(counts_LE, probs_LE).mean()))
        return stats


def listening(load: StepLoad | None) -> AbstractContextManager[None]:
    """Return `StepLoad.listening`, or an empty context."""
    return nullcontext() if load is None else load.listening()


def counting(load: StepLoad | None, layout: Layout) -> AbstractContextManager[None]:
    """Return `StepLoad.of`, or an empty context."""
    return nullcontext() if load is None else load.of(layout)


class _WithLoss(torch.autograd.Function):
    """The identity of its first argument; the gradient also contains that of a loss.

    The loss needs no path to the end of the network. It therefore works with layers that are recomputed, and with
    sharded layers, which are gathered only while their own gradient is computed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        # The gradient of the loss with respect to itself is 1, whatever arrives for `x`: so it is added to the total
        # loss.
        return gradients[0], gradients[0].new_ones((), dtype=torch.float32)


def differentiate_with_hidden(hidden_RH: Tensor, loss: Tensor) -> None:
    """Accumulate the gradient of `loss`, and pass through all layers even if the loss does not reach them."""
    roots = [(hidden_RH, torch.zeros_like(hidden_RH)), (loss, torch.ones_like(loss))]
    if reached := [(root, seed) for root, seed in roots if root.requires_grad]:
        torch.autograd.backward([root for root, _ in reached], [seed for _, seed in reached])

"""Routers of a mixture-of-experts model: layers that choose the experts of each token, and the replay of their choices.

Router replay (arXiv:2510.11370): passes of the training engine use the experts that the sampler's routers chose.
Rounding differs between a rollout and a training pass, and the weights change between the two. A router whose best
experts are close to each other then chooses others for some tokens, and their log-probs jump. With replay, the experts
are those of the rollout (key `router_experts`). Their weights are computed from the current router logits, so the
gradient still reaches the router.

Shapes: T packed tokens, R rows of a pass, L routers, E experts per router, K chosen experts per row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from realign.api.router_experts import ROUTER_EXPERTS, experts_per_token
from realign.api.sample import SequenceSample
from realign.api.stats import Mean, Stats, merge_stats
from realign.errors import ConfigError
from realign.models.files.unread import read_now
from realign.models.network.passes import Layout

_ROWS = 16
"""Number of random rows that check a router."""
_TOLERANCE = 1e-4

BIAS = "e_score_correction_bias"
"""Buffer [E] of a router that it adds to the scores of experts, only to choose among them."""


@dataclass(frozen=True, eq=False)
class Routed:
    """Output of a router for the rows of a pass."""

    logits_RE: Tensor
    scores_RK: Tensor
    """Weights of the outputs of the chosen experts."""
    chosen_RK: Tensor


Listener: TypeAlias = Callable[[int, Routed], Routed]
"""Receives the index of a router and its output, and returns the output that the experts use."""


class _GateRule(NamedTuple):
    """How a router weights the outputs of the experts that it chose."""

    sigmoid: bool
    """Whether the score of an expert is the sigmoid of its logit; False: the softmax over all experts."""
    normalized: bool
    """Whether the scores of the chosen experts are divided by their sum."""
    scale: float
    """Factor of the scores."""

    def weights(self, logits_RE: Tensor, chosen_RK: Tensor) -> Tensor:
        """Return the weights [R, K] of any choice of experts, fp32."""
        logits_RE = logits_RE.float()
        scores_RE = logits_RE.sigmoid() if self.sigmoid else logits_RE.softmax(-1)
        scores_RK = scores_RE.gather(-1, chosen_RK)
        if self.normalized:
            scores_RK = scores_RK / scores_RK.sum(-1, keepdim=True)
        return scores_RK if self.scale == 1 else scores_RK * self.scale


class Routers:
    """The routers of a model, in the order of its layers.

    Attributes:
        modules: the routers.
        experts: number of experts of each router.
        chosen: number of experts that each router chooses for a token.
        device: device of their passes.
        softmax: whether they choose the most probable experts of a softmax, and weight them by their probabilities
            (over all experts, or over the chosen ones).
        gates: how they weight the chosen experts; None if they follow no known rule.
    """

    def __init__(self, module: Any) -> None:
        """Find and check the routers of a transformers model.

        Raises:
            ConfigError: the model has none, or they do not return logits, scores and chosen experts.
        """
        family = f"model family {module.config.model_type!r}"
        self.modules: Sequence[nn.Module] = _find(module)
        if not self.modules:
            raise ConfigError(f"{family} has no routers of experts that transformers can record.")
        sizes = set()
        self.device: torch.device = next(module.parameters()).device
        with torch.no_grad():
            for router in self.modules:
                read_now(router)  # small, and checked by its results
                sizes.add(_check(router, family))
        if len(sizes) > 1:
            kinds = "; ".join(sorted(map(str, sizes)))
            raise ConfigError(f"{family} has different routers (experts, chosen experts, softmax, weights): {kinds}.")
        self.experts, self.chosen, self.softmax, self.gates = sizes.pop()

    @property
    def biases(self) -> list[Tensor]:
        """The biases [E] of all routers; empty if a router has none."""
        buffers = [dict(router.named_buffers(recurse=False)).get(BIAS) for router in self.modules]
        biases = [bias for bias in buffers if bias is not None]
        return biases if len(biases) == len(buffers) else []

    @contextmanager
    def listen(self, listener: Listener, *, first: bool = False) -> Iterator[None]:
        """Call `listener` for each output of a router within the context, including recomputed layers.

        Args:
            listener: receives the outputs.
            first: whether it precedes other listeners, which then receive its result.
        """
        with ExitStack() as hooks:
            for number, router in enumerate(self.modules):
                hook = partial(_hook, listener, number)
                hooks.callback(router.register_forward_hook(hook, prepend=first).remove)
            yield

    def of_copy(self, module: Any) -> Routers:
        """Return the routers of a copy of the model."""
        routers = copy.copy(self)
        routers.modules, routers.device = _find(module), next(module.parameters()).device
        return routers

    @property
    def width(self) -> int:
        """Number of experts that all routers together choose for a token, L * K."""
        return len(self.modules) * self.chosen


def _hook(listener: Listener, number: int, router: nn.Module, given: Any, output: Any) -> Any:
    logits_RE, scores_RK, chosen_RK = output
    used = listener(number, Routed(logits_RE, scores_RK, chosen_RK))
    return logits_RE, used.scores_RK, used.chosen_RK  # the loss of load balancing sees the router's own logits


def _find(module: nn.Module) -> list[nn.Module]:
    """Return the modules whose first output transformers records as router logits."""
    kinds: set[type[nn.Module]] = set()
    for part in module.modules():
        recorded = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits")
        for recorder in recorded if isinstance(recorded, list) else [recorded]:
            kind = getattr(recorder, "target_class", recorder)
            if isinstance(kind, type):
                kinds.add(kind)
    return [part for part in module.modules() if isinstance(part, tuple(kinds))]


def _check(router: nn.Module, family: str) -> tuple[int, int, bool, _GateRule | None]:
    """Return the numbers of experts and of chosen experts, whether a softmax chooses, and the rule of the weights.

    All of them are verified on random rows.
    """
    try:
        weight = next(router.parameters())
        rows = torch.randn(_ROWS, weight.shape[-1], generator=torch.Generator().manual_seed(0)).to(weight)
        logits_RE, scores_RK, chosen_RK = router(rows)
        probs_RE = logits_RE.float().softmax(-1)
        got_RK = probs_RE.gather(-1, chosen_RK)
        # sorted, since a router may return its choices in any order
        top = _same(got_RK.sort(-1, descending=True).values, probs_RE.topk(chosen_RK.shape[-1], -1).values)
        scales = {1.0, float(getattr(router, "routed_scaling_factor", 1.0))}
        rules = (_GateRule(*rule) for rule in product((False, True), (False, True), sorted(scales)))
        gates = next((rule for rule in rules if _same(scores_RK, rule.weights(logits_RE, chosen_RK))), None)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # routers of other families need more inputs or return something else
        kind = type(router).__name__
        raise ConfigError(f"{family} has routers ({kind}) that do not return logits, scores and experts.") from error
    softmax = top and gates is not None and not gates.sigmoid and gates.scale == 1
    return probs_RE.shape[-1], chosen_RK.shape[-1], softmax, gates


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.float(), b, atol=_TOLERANCE)


class RouterReplay:
    """Replays recorded choices in the passes of one model.

    Attributes:
        routers: routers of the model.
    """

    def __init__(self, module: Any) -> None:
        """Find the routers of a transformers model.

        Raises:
            ConfigError: the model has no routers, or their choices cannot be replayed.
        """
        self.routers = Routers(module)
        if self.routers.gates is None:
            raise ConfigError(
                f"model family {module.config.model_type!r} has routers whose expert weights follow no known rule."
            )
        self._active = False
        self._experts_RLK: Tensor | None = None  # kept after a pass, for layers that the backward pass recomputes
        self._changed: list[Tensor] | None = None
        self._stats: list[Stats] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Replay in all passes within the context, and in layers that their backward passes recompute."""
        self._active = True
        try:
            with self.routers.listen(self._hear, first=True):
                yield
        finally:
            self._active, self._experts_RLK = False, None

    @contextmanager
    def of(self, part: SequenceSample, layout: Layout, *, counts: bool) -> Iterator[None]:
        """Replay the choices of a micro-batch in a pass over it, if it has any.

        Args:
            part: the micro-batch, on the device of the model.
            layout: the layout of its rows.
            counts: whether the pass counts changed choices for `take_stats`.

        Raises:
            ValueError: the choices are those of another model.
        """
        self._experts_RLK = self._rows(part, layout)
        if self._experts_RLK is None:
            yield
            return
        self._changed = [] if counts else None
        with ExitStack() as stack:
            # A training step is active around all its passes, so that the hooks are still there when the backward pass
            # recomputes checkpointed layers. Other passes have hooks only while they run.
            if not self._active:
                stack.enter_context(self.active())
            yield
        if self._changed:
            self._stats.append(_changes(torch.stack(self._changed, 1), layout))
        self._changed = None  # layers that are recomputed for the gradient do not count again

    def _rows(self, part: SequenceSample, layout: Layout) -> Tensor | None:
        """Return the recorded experts of each row, [R, L, K]; None if nothing was recorded."""
        experts = experts_per_token(part)
        if experts is None:
            return None
        if experts.shape[1] != self.routers.width:
            raise ValueError(
                f"key {ROUTER_EXPERTS!r} has {experts.shape[1]} experts per token, but the routers of this model "
                f"choose {self.routers.width}. Sample with the same model"
            )
        if layout.token_R is not None:
            experts = experts[layout.token_R.to(experts.device)]
        experts = layout.of_own(experts)
        return experts.long().view(len(experts), len(self.routers.modules), -1)

    def _hear(self, router: int, routed: Routed) -> Routed:
        if self._experts_RLK is None or self.routers.gates is None:
            return routed
        recorded_RK = self._experts_RLK[:, router]
        # a row is known or unknown as a whole, so the first expert tells
        known_R1 = recorded_RK[:, :1] >= 0
        if self._changed is not None:
            # the same experts in another order are no change
            differs_RK = recorded_RK.sort(-1).values != routed.chosen_RK.sort(-1).values
            self._changed.append(torch.where(known_R1[:, 0], differs_RK.any(-1).float(), torch.nan))
        chosen_RK = torch.where(known_R1, recorded_RK, routed.chosen_RK)
        scores_RK = self.routers.gates.weights(routed.logits_RE, chosen_RK)
        return Routed(routed.logits_RE, scores_RK.to(routed.scores_RK.dtype), chosen_RK)

    def take_stats(self) -> Stats:
        """Return the fractions of changed choices in all counted passes, and reset them; empty without replay."""
        stats, self._stats = merge_stats(self._stats), []
        return stats


def _changes(changed_RL: Tensor, layout: Layout) -> Stats:
    """Return the metrics of a pass; `changed_RL` is NaN for tokens without a record."""
    known_R = changed_RL[:, 0].isfinite()
    weight_R = torch.where(known_R, layout.tokens_per_row(changed_RL.device), 0)
    changed_RL = changed_RL.nan_to_num()
    tokens = weight_R.sum()
    return {
        "router_changes": Mean((changed_RL.mean(-1) * weight_R).sum(), tokens),
        "router_changed_tokens": Mean((changed_RL.amax(-1) * weight_R).sum(), tokens),
    }

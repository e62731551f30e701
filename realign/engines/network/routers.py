"""Routers of a mixture-of-experts model: layers that choose the experts of each token.

Shapes: L routers, R rows of a pass, E experts per router, K chosen experts per row.
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

from realign.engines.device import full_fp32
from realign.errors import ConfigError

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


class GateRule(NamedTuple):
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
        with torch.no_grad(), full_fp32(self.device):
            for router in self.modules:
                sizes.add(_check(router, family))
        if len(sizes) > 1:
            found = "; ".join(sorted(map(str, sizes)))
            raise ConfigError(f"{family} has different routers (experts, chosen experts, softmax, weights): {found}.")
        self.experts, self.chosen, self.softmax, self.gates = sizes.pop()

    @property
    def biases(self) -> list[Tensor]:
        """The biases [E] of all routers; empty if a router has none."""
        found = [dict(router.named_buffers(recurse=False)).get(BIAS) for router in self.modules]
        biases = [bias for bias in found if bias is not None]
        return biases if len(biases) == len(found) else []

    @contextmanager
    def heard_by(self, listener: Listener, *, first: bool = False) -> Iterator[None]:
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
        found = copy.copy(self)
        found.modules, found.device = _find(module), next(module.parameters()).device
        return found

    @property
    def width(self) -> int:
        """Number of experts that all routers together choose for a token, L * K."""
        return len(self.modules) * self.chosen


def _hook(listener: Listener, number: int, router: nn.Module, given: Any, output: Any) -> Any:
    logits_RE, scores_RK, chosen_RK = output
    used = listener(number, Routed(logits_RE, scores_RK, chosen_RK))
    return logits_RE, used.scores_RK, used.chosen_RK


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


def _check(router: nn.Module, family: str) -> tuple[int, int, bool, GateRule | None]:
    """Return the numbers of experts and of chosen experts, whether a softmax chooses, and the rule of the weights.

    All of them are verified on random rows.
    """
    try:
        weight = next(router.parameters())
        rows = torch.randn(_ROWS, weight.shape[-1], generator=torch.Generator().manual_seed(0)).to(weight)
        logits_RE, scores_RK, chosen_RK = router(rows)
        probs_RE = logits_RE.float().softmax(-1)
        got_RK = probs_RE.gather(-1, chosen_RK)
        top = _same(got_RK.sort(-1, descending=True).values, probs_RE.topk(chosen_RK.shape[-1], -1).values)
        scales = {1.0, float(getattr(router, "routed_scaling_factor", 1.0))}
        rules = (GateRule(*rule) for rule in product((False, True), (False, True), sorted(scales)))
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

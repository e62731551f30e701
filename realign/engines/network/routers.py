"""Routers of a mixture-of-experts model: layers that choose the experts of each token.

Shapes: L routers, R rows of a pass, E experts per router, K chosen experts per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from realign.engines.precision import full_fp32
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


Listener: TypeAlias = Callable[[int, Routed], Tensor]
"""Receives the index of a router and its output, and returns the scores that the experts use, [R, K]."""


class Routers:
    """The routers of a model, in the order of its layers.

    Attributes:
        modules: the routers.
        experts: number of experts of each router.
        chosen: number of experts that each router chooses for a token.
        device: device of their passes.
        softmax: whether they choose the most probable experts of a softmax, and weight them by their probabilities
            (over all experts, or over the chosen ones).
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
            raise ConfigError(f"{family} has different routers: {sorted(sizes)} (experts, chosen experts, softmax).")
        self.experts, self.chosen, self.softmax = sizes.pop()

    @property
    def biases(self) -> list[Tensor]:
        """The biases [E] of all routers; empty if a router has none."""
        found = [dict(router.named_buffers(recurse=False)).get(BIAS) for router in self.modules]
        biases = [bias for bias in found if bias is not None]
        return biases if len(biases) == len(found) else []

    @contextmanager
    def heard_by(self, listener: Listener) -> Iterator[None]:
        """Call `listener` for each output of a router within the context, including recomputed layers."""
        with ExitStack() as hooks:
            for number, router in enumerate(self.modules):
                hooks.callback(router.register_forward_hook(partial(_hook, listener, number)).remove)
            yield


def _hook(listener: Listener, number: int, router: nn.Module, given: Any, output: Any) -> Any:
    logits_RE, scores_RK, chosen_RK = output
    return logits_RE, listener(number, Routed(logits_RE, scores_RK, chosen_RK)), chosen_RK


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


def _check(router: nn.Module, family: str) -> tuple[int, int, bool]:
    """Return the numbers of experts and of chosen experts, and whether a softmax chooses, on random rows."""
    weight = next(router.parameters())
    rows = torch.randn(_ROWS, weight.shape[-1], generator=torch.Generator().manual_seed(0)).to(weight)
    try:
        logits_RE, scores_RK, chosen_RK = router(rows)
        probs_RE = logits_RE.float().softmax(-1)
        got_RK = probs_RE.gather(-1, chosen_RK)
        top = _same(got_RK.sort(-1, descending=True).values, probs_RE.topk(chosen_RK.shape[-1], -1).values)
        weighted = _same(scores_RK, got_RK) or _same(scores_RK, got_RK / got_RK.sum(-1, keepdim=True))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # routers of other families need more inputs or return something else
        kind = type(router).__name__
        raise ConfigError(f"{family} has routers ({kind}) that do not return logits, scores and experts.") from error
    return probs_RE.shape[-1], chosen_RK.shape[-1], top and weighted


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.float(), b, atol=_TOLERANCE)

"""Router replay: passes of the training engine use the experts that the sampler's routers chose (arXiv:2510.11370).

Rounding differs between a rollout and a training pass, and the weights change between the two. A router whose best
experts are close to each other then chooses others for some tokens, and their log-probs jump. With replay, the experts
are those of the rollout (key `router_experts`). Their weights are computed from the current router logits, so the
gradient still reaches the router.

Shapes: T packed tokens, R rows of a pass, L routers, K chosen experts per row, E experts per router.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from realign.api.router_experts import ROUTER_EXPERTS, experts_per_token
from realign.api.sample import SequenceSample
from realign.api.stats import Mean, Stats, merge_stats
from realign.engines.network.routers import Routed, Routers
from realign.engines.network.shared_prefix import Layout
from realign.errors import ConfigError


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
            with self.routers.heard_by(self._hear, first=True):
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
        return experts.long().view(len(experts), len(self.routers.modules), -1)

    def _hear(self, router: int, routed: Routed) -> Routed:
        if self._experts_RLK is None or self.routers.gates is None:
            return routed
        recorded_RK = self._experts_RLK[:, router]
        known_R1 = recorded_RK[:, :1] >= 0
        if self._changed is not None:
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


__all__ = ["RouterReplay"]

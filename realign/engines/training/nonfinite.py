"""Locate the source of a non-finite loss or gradient. The search runs only after a failed step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from realign.api.engine import LossFn
from realign.api.microbatch import MicroBatchSpec
from realign.api.sample import SequenceSample
from realign.engines.training.stepper import Stepper
from realign.models.network.network import Network
from realign.models.network.passes import Layout, Passes

_IsFinite: TypeAlias = Callable[[SequenceSample, Layout | None], bool]

NAMED = 8
"""Maximum number of ids in a message. The search stops when it exceeds this number."""


@dataclass(frozen=True, eq=False)
class Accumulated:
    """Inputs of the accumulated gradient, kept to locate the source of a non-finite value."""

    passes: Passes
    losses: Sequence[Tensor]
    """Loss of each micro-batch, 0-d."""
    loss_fn: LossFn


def origin_in(done: Accumulated, network: Network, stepper: Stepper, weight: Tensor) -> str:
    """Describe the source of a non-finite loss or gradient, and leave no gradient behind.

    Args:
        done: inputs of the accumulated gradient.
        network: network of the engine, set up for a training pass.
        stepper: its optimizer.
        weight: divisor of the loss; 0-d.
    """
    if (broken := network.nonfinite_weight()) is not None:
        return f"the model: weight {broken!r} is not finite"

    def is_finite(part: SequenceSample, layout: Layout | None) -> bool:
        layout = layout or next(iter(network.passes(part, MicroBatchSpec(), training=True)))[1]
        moved = part.to(network.device)
        loss, _ = done.loss_fn(network.run(part, moved, layout, training=True), moved)
        if loss.requires_grad:
            (loss / weight).backward()
        finite = bool(loss.isfinite()) and bool(stepper.gradient_norm().isfinite())
        stepper.zero_grad()
        return finite

    return origin(list(done.passes), done.losses, is_finite)


def origin(
    micro_batches: Sequence[tuple[SequenceSample, Layout]], losses: Sequence[Tensor], is_finite: _IsFinite
) -> str:
    """Name the prompts whose loss or gradient is not finite.

    Args:
        micro_batches: micro-batches of the step, with their layouts.
        losses: loss of each micro-batch, 0-d.
        is_finite: recomputes loss and gradient of a sample and returns whether both are finite; if the layout is
            None, it computes a new one.

    Returns:
        A description with the ids, or a statement that every micro-batch is finite by itself.
    """
    # The losses are known already. Gradients cost another pass for each micro-batch.
    culprits = [part for (part, _), loss in zip(micro_batches, losses, strict=True) if not bool(loss.isfinite())]
    what = "loss"
    if not culprits:
        culprits, what = [part for part, layout in micro_batches if not is_finite(part, layout)], "gradient"
    if not culprits:
        return "no single micro-batch: each has a finite loss and gradient, but their sum is not finite"
    ids: dict[Hashable, None] = {}  # in order of discovery; a split group has its id in two micro-batches
    for i in _culprits(culprits, is_finite):
        if len(ids) == NAMED and i not in ids:
            return f"the {what} of ids {', '.join(map(repr, ids))} and others"
        ids[i] = None
    return f"the {what} of id{'s' if len(ids) > 1 else ''} {', '.join(map(repr, ids))}"


def _culprits(parts: Sequence[SequenceSample], is_finite: _IsFinite) -> Iterator[Hashable]:
    """Yield the ids of each micro-batch that are non-finite by themselves, or all of its ids if none is."""
    for part in parts:
        # A generator: each id costs a pass, and the caller stops after `NAMED` of them.
        alone = (i for k, i in enumerate(part.ids) if not is_finite(part.take([k]), None))
        first = next(alone, None) if len(part) > 1 else None
        if first is None:
            yield from part.ids
        else:
            yield first
            yield from alone

"""Retry items that a reward server did not answer, and give up after a time without answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from realign.rewards.pool.answers import FailureKind, Problem
from realign.rewards.pool.items import Item
from realign.rewards.pool.processes import Answers

logger = logging.getLogger(__name__)

SILENT = (FailureKind.timeout, FailureKind.unreachable)


def patient(
    ask: Callable[[Sequence[Item]], Answers], items: Sequence[Item], *, name: str, patience_s: float, least: int
) -> Answers:
    """Yield the answers of `ask`, one per item; retry unreachable servers until `patience_s` is over.

    Items that a server did not answer are sent again, since the server may recover. Items that timed out fail, since
    the function may hang on them. After `patience_s` seconds without an answer, all remaining items fail.

    Args:
        ask: answers items; its generator may be closed early.
        items: the items to answer.
        name: name of the function, for messages.
        patience_s: seconds without an answer after which the remaining items fail. An exception counts as an answer.
        least: number of consecutive silent items required before giving up.
    """
    waiting = list(range(len(items)))
    heard, silent, logged = time.monotonic(), 0, False
    while waiting:
        again: list[int] = []
        last = Problem(FailureKind.unreachable, "")
        with closing(ask([items[i] for i in waiting])) as answers:
            for place, found in answers:
                index, waiting[place] = waiting[place], -1
                if not isinstance(found, Problem) or found.kind not in SILENT:
                    heard, silent = time.monotonic(), 0
                    yield index, found
                    continue
                if not logged and found.kind is FailureKind.unreachable:
                    logged = True
                    logger.warning(
                        "%s. Unanswered items are retried for up to patience_s=%g s.", found.message, patience_s
                    )
                silent, last = silent + 1, found
                if found.kind is FailureKind.timeout:
                    yield index, found
                else:
                    again.append(index)
                if silent >= least and time.monotonic() - heard > patience_s:
                    break
        waiting = [*again, *(i for i in waiting if i >= 0)]
        if waiting and silent >= least and time.monotonic() - heard > patience_s:
            why = f"no answer for patience_s={patience_s:g} s"
            logger.warning("reward function %s: %s; %d of %d items get no reward.", name, why, len(waiting), len(items))
            yield from ((i, Problem(last.kind, f"{last.message}; {why}")) for i in waiting)
            return

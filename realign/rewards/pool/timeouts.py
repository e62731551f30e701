"""How long a reward function or server that gives no answers is waited for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from realign.rewards.pool.processes import Answers
from realign.rewards.pool.worker import FailureKind, Item, Problem

logger = logging.getLogger(__name__)

SILENT = (FailureKind.timeout, FailureKind.unreachable)


def patient(
    ask: Callable[[Sequence[Item]], Answers], items: Sequence[Item], *, name: str, patience_s: float, least: int
) -> Answers:
    """What `ask` gives, each item once, with patience for silence and an end to it.

    Items that a server did not answer are asked for again, since it may come back. Those that timed out have failed: it
    may be they that the function hangs on. When nothing else came for `patience_s`, all that is left has failed.

    Args:
        ask: answers items, and may be closed early.
        items: to be answered.
        name: of the function, for messages.
        patience_s: seconds without an answer (an exception is one) after which the rest is given up.
        least: silent items in a row without which nothing is given up.
    """
    waiting = list(range(len(items)))
    heard, silent, told = time.monotonic(), 0, False
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
                if not told and found.kind is FailureKind.unreachable:
                    told = True
                    logger.warning("%s; asking again, for up to patience_s=%g s", found.message, patience_s)
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
            logger.warning("reward function %s: %s; %d of %d items are given up", name, why, len(waiting), len(items))
            yield from ((i, Problem(last.kind, f"{last.message}; {why}")) for i in waiting)
            return

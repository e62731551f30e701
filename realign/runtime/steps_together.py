"""Let the models of a graph skip an optimizer step together, if the loss or gradient of one of them is not finite."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Self, TypeVar

import torch

from realign.api import RPC
from realign.api.engine import PipelinableEngine

T = TypeVar("T")


def steps_together(rpcs: Sequence[RPC]) -> list[list[RPC]]:
    """Return the calls of a graph in order, those that follow each other and train different models as one entry."""
    entries = []
    for trains, calls in groupby(rpcs, key=lambda rpc: rpc.method == "train_step"):
        rows = list(calls)
        together = trains and len({rpc.model for rpc in rows}) == len(rows)
        entries += [rows] if together else [[rpc] for rpc in rows]
    return entries


class StepsTogether:
    """Calls that train, each in a thread. The n-th optimizer steps of all of them are taken, or none is.

    A call that takes fewer steps than the others leaves when it ends.

    Args:
        names: names of the calls.
        in_turns: run one call at a time, from step to step, always in the same order. Collectives and random numbers of
            this process then have one order.
    """

    def __init__(self, names: Sequence[str], *, in_turns: bool) -> None:
        self._active = list(names)
        self._in_turns = in_turns
        self._turn = names[0]
        self._steps = dict.fromkeys(names, 0)
        self._bad: set[int] = set()
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Release the calls that wait for one that an error of the graph prevents."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    @contextmanager
    def join(self, name: str, engine: PipelinableEngine) -> Iterator[None]:
        """Take part in the steps with the model of a call, from its thread."""
        engine.agree_on_steps(partial(self._agree, name))
        try:
            with self._changed:
                self._wait(name, step=0)
            yield
        except BaseException as error:
            self._error = self._error or error
            raise
        finally:
            engine.agree_on_steps(None)
            with self._changed:
                self._pass_turn(name)
                self._active.remove(name)
                self._changed.notify_all()

    def _agree(self, name: str, finite: bool) -> bool:
        with self._changed:
            self._steps[name] += 1
            step = self._steps[name]
            if not finite:
                self._bad.add(step)
            self._pass_turn(name)
            self._changed.notify_all()
            self._wait(name, step)
            return step not in self._bad

    def _wait(self, name: str, step: int) -> None:
        """Wait until every call has reached `step`, and it is the turn of this one."""

        def ready() -> bool:
            arrived = all(self._steps[other] >= step for other in self._active)
            return self._error is not None or (arrived and (not self._in_turns or self._turn == name))

        self._changed.wait_for(ready)
        if self._error is not None:  # the same error: whichever thread ends first, the run names its cause
            raise self._error

    def _pass_turn(self, name: str) -> None:
        if self._turn == name:
            self._turn = self._active[(self._active.index(name) + 1) % len(self._active)]


def run_in_turns(calls: Sequence[tuple[str, PipelinableEngine, Callable[[], T]]]) -> list[T]:
    """Run calls (name, engine, function) whose optimizer steps are skipped together, and return their results."""
    steps = StepsTogether([name for name, _, _ in calls], in_turns=True)
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run(name: str, engine: PipelinableEngine, make: Callable[[], T]) -> T:
        if device is not None:  # each thread has its own current device
            torch.cuda.set_device(device)
        with steps.join(name, engine):
            return make()

    with ThreadPoolExecutor(len(calls), thread_name_prefix="train") as threads:
        futures = [threads.submit(run, *call) for call in calls]
    return [future.result() for future in futures]


__all__ = ["StepsTogether", "run_in_turns", "steps_together"]

"""`RunCheckpoints`: when the checkpoints of a run are due, what they contain, and how failed writes are reported."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

from realign.engines.distributed.ranks import current
from realign.errors import TransientError
from realign.runtime.callbacks.run_callbacks import RunCallbacks
from realign.runtime.checkpoint.background_writer import CheckpointWriter, failed_write
from realign.runtime.checkpoint.exports import Saves
from realign.runtime.checkpoint.final_models import FINAL, settle
from realign.runtime.checkpoint.folder import CHECKPOINTS
from realign.runtime.checkpoint.state import interface_states, run_state
from realign.runtime.metrics.records import Records
from realign.runtime.out_of_memory import SMALLER, memory_limited
from realign.runtime.step import LocalRuntime


class RunCheckpoints:
    """Writes the checkpoints of a run until the context ends. In distributed training each method is a collective.

    Args:
        runtime: Runtime whose state is saved.
        records: Record files of the run. Resuming truncates them to their size at the checkpoint.
        saves: Saved folders of models.
        callbacks: Callbacks of the run.
        frozen: Result of `frozen_weights` before the first step.
    """

    def __init__(
        self,
        runtime: LocalRuntime,
        records: Records,
        saves: Saves,
        callbacks: RunCallbacks,
        frozen: Mapping[str, Any],
    ) -> None:
        self._runtime, self._records, self._saves, self._frozen = runtime, records, saves, frozen
        self._callbacks = callbacks
        self._ranks = current()
        self._spec = runtime.experiment.checkpoint
        self._writer: CheckpointWriter | None = None
        if self._spec is not None:
            folder = runtime.experiment.output_dir / CHECKPOINTS
            self._writer = CheckpointWriter(folder, self._spec.keep, self._ranks)
        self._last = time.monotonic()
        self._stalled: dict[str, float] = {}
        self._interfaces: dict[str, Any] | None = None
        self._problems: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if not isinstance(value, KeyboardInterrupt):  # exit at once on an interrupt
            _warn_of(self.close())

    def begin(self) -> None:
        """Write a checkpoint before the first step, so that a run can always be resumed."""
        if self._writer is not None:
            self._write(self._writer, 0)
            self._writer.close()

    def after_step(self, step: int, *, now: bool) -> None:
        """Write a checkpoint if one is due, if `now` is set, or if this is the best step so far."""
        now = now or self._saves.best_step == step
        if self._spec is None or self._writer is None:
            return
        if self._ranks.broadcast(now or self._spec.due(step, time.monotonic() - self._last)):
            self._write(self._writer, step)

    def finish(self, step: int) -> None:
        """Write the last checkpoint, with the hashes of `final`.

        Its existence shows that the run is complete and its models are saved.
        """
        if self._writer is not None:
            folder = self._runtime.experiment.output_dir / FINAL
            self._write(self._writer, step, {"final": self._ranks.lead(partial(settle, folder))})

    def metrics(self) -> dict[str, float]:
        """Return `time/checkpoint_s` once after each checkpoint, for the metrics of the following step."""
        stalled, self._stalled = self._stalled, {}
        return stalled

    def keep_interfaces(self) -> None:
        """Store the current interface state for the next checkpoint, regardless of later changes."""
        self._interfaces = interface_states(self._runtime)

    def close(self) -> list[str]:
        """Wait until the last checkpoint is written, and return the errors that were not reported before."""
        if self._writer is not None:
            self._writer.close()
        return self._take_problems()

    def _write(self, writer: CheckpointWriter, step: int, of_saves: Mapping[str, Any] | None = None) -> None:
        started = time.perf_counter()
        _warn_of(f"{problem} Training continues." for problem in self._take_problems())
        try:
            with memory_limited(f"checkpoint at step {step}", SMALLER):
                state = run_state(self._runtime, self._frozen)
            state["callbacks"] = self._callbacks.state_dict()
            state |= {"records": self._records.state_dict(), "saves": self._saves.state_dict() | dict(of_saves or {})}
            if self._interfaces is not None:
                state["interfaces"] = self._interfaces
            writer.write(step, state, best=self._saves.best_step)
        except (OSError, TransientError, ValueError) as error:  # full disk; interface state that cannot be serialized
            self._problems.append(failed_write(step, error))
        self._last = time.monotonic()
        self._stalled = {"time/checkpoint_s": time.perf_counter() - started}

    def _take_problems(self) -> list[str]:
        problems, self._problems = self._problems, []
        return problems + (self._writer.failed() if self._writer is not None else [])


def _warn_of(problems: Iterable[str]) -> None:
    for problem in problems:
        warnings.warn(problem, stacklevel=3)

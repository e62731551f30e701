"""`run`: the loop around the steps of an experiment: records, evaluations, saved models, checkpoints, a clean stop."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from rich.console import Console

from realign.runtime.checkpoints import CheckpointWriter
from realign.runtime.curves import draw_curves
from realign.runtime.exclusive import alone_in
from realign.runtime.experiment import CHECKPOINTS, Experiment
from realign.runtime.local import LocalRuntime
from realign.runtime.records import Records
from realign.runtime.resume import Start, find_start
from realign.runtime.samples import SHOWN, show
from realign.runtime.saving import Saves
from realign.runtime.signals import Interrupted, StopSignals
from realign.runtime.state import check_frozen, frozen_weights, interface_states, restore, run_state, seed_random
from realign.runtime.tracking import Forgiving, LiveDisplay, Tracker
from realign.runtime.trees import pack

HEADLINE = (
    "reward",
    "eval/reward",
    "accuracy",
    "eval/accuracy",
    "nll",
    "entropy",
    "clip_fraction",
    "approx_kl",
    "ref_kl_per_sequence",
    "critic/explained_variance",
    "explained_variance",
    "response_tokens",
    "grad_norm",
    "lr",
    "rollout_tokens_per_s",
    "train_tokens_per_s",
    "step_s",
)


@dataclass
class RunResult:
    """What a run leaves behind."""

    output_dir: Path
    history: list[dict[str, float]] = field(default_factory=list)
    """One record per step: `step` and its metrics (step 0: before training)."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Judged held-out responses after training: prompt, response, reward."""

    def series(self, metric: str) -> list[float]:
        """The values of one metric, over the steps that have it."""
        return [record[metric] for record in self.history if metric in record]


def run(experiment: Experiment, *, console: Console | None = None, trackers: Iterable[Tracker] = ()) -> RunResult:
    """Load everything, train for `experiment.steps`, evaluate, save; see `Experiment` for the knobs.

    In the main thread, Ctrl-C and SIGTERM let the step under way end and write a checkpoint first.

    Args:
        experiment: what to do.
        console: where progress is shown; None shows nothing.
        trackers: further receivers of the metrics; whoever made them closes them.

    Returns:
        The history, and where the files are.

    Raises:
        ValueError: something in the experiment, its data or the checkpoint to resume from is wrong; named in the
            message; or another run is under way in the same folder.
        RuntimeError: training went wrong (a reward function that fails too often, no optimizer step in the whole run).
        FloatingPointError: loss or gradient was not finite in too many optimizer steps in a row.
        Interrupted: a signal stopped the run; the message says after which step.
    """
    experiment.refuse_earlier_run()
    with ExitStack() as stack:
        if is_there := experiment.output_dir.is_dir():
            stack.enter_context(alone_in(experiment.output_dir))
        start = find_start(experiment)
        seed_random(experiment.seed)
        runtime = LocalRuntime(experiment)
        stack.callback(runtime.close)
        experiment.output_dir.mkdir(parents=True, exist_ok=True)
        if not is_there:
            stack.enter_context(alone_in(experiment.output_dir))
        training = _Training(runtime, start, console, trackers, stack)
        del start  # it holds weights and moments once more
        return training.run()


class _Training:
    """One run while it lasts."""

    def __init__(
        self,
        runtime: LocalRuntime,
        start: Start | None,
        console: Console | None,
        trackers: Iterable[Tracker],
        stack: ExitStack,
    ) -> None:
        """Restore what `start` holds, and open files and trackers, which `stack` closes."""
        self.experiment, self.out = runtime.experiment, runtime.experiment.output_dir
        self.runtime, self.console = runtime, console
        self.first = 1 if start is None else start.step + 1
        self.fresh = start is None or start.anew
        e = self.experiment
        self.saves = Saves(self.out, runtime.save, e.save_every_steps, e.keep_saves, e.save_best)
        frozen = frozen_weights(runtime) if e.checkpoint is not None or start is not None else {}
        if start is not None:
            check_frozen(start.state["frozen"], frozen)
            restore(runtime, start.state, e.resume_skip)
            runtime.batches_ahead = runtime.prompts.drawn - start.step
            if not start.anew:
                self.saves.load_state_dict(start.state["saves"])
            self._say(f"resumed from {start.checkpoint.path}: step {self.first} of {e.steps} is next")
        if e.checkpoint is not None:
            pack(interface_states(runtime), copy=False)  # what cannot be kept is told now, not in ten minutes
        if start is None or not start.own:
            e.clear_earlier_run()
        self.result = RunResult(self.out)
        stack.callback(_draw, e.name, self.result)  # an interrupted run leaves its curves too
        self.records = stack.enter_context(Records(self.out, start))
        if not self.fresh:
            self.result.history = self.records.history()
        if e.resolved:
            text = yaml.safe_dump(dict(e.resolved), sort_keys=False, allow_unicode=True)
            (self.out / "config.yaml").write_text(text, encoding="utf-8")
        self.checkpoints = stack.enter_context(_Checkpoints(runtime, self.records, self.saves, frozen))
        self.receivers = [self.records.metrics, *trackers, *self._opened(stack)]

    def _opened(self, stack: ExitStack) -> Iterable[Tracker]:
        for name, spec in self.experiment.trackers.items():
            tracker = Forgiving(name, spec.open(self.experiment.name, self.out))
            stack.callback(tracker.close)
            yield tracker
        if self.console is not None:
            display = LiveDisplay(self.console, self.experiment.name, self.experiment.steps, HEADLINE)
            yield Forgiving("display", stack.enter_context(display))

    def run(self) -> RunResult:
        """All steps that are left."""
        if self.fresh:
            before = self.runtime.calibrate("before") | self._evaluate(0)
            self._log(0, before)
            self.saves.after_step(0, before, last=False)
            if self.experiment.save_every_steps or self.experiment.save_best:
                self.checkpoints.begin()
        steps = self.experiment.steps
        with StopSignals() as signals:
            for step in range(self.first, steps + 1):
                self._step(step)
                if step < steps:
                    self.checkpoints.after_step(step, now=signals.received is not None)
                    if signals.received is not None:
                        raise Interrupted(signals.received, self._stopped(step))
            self.runtime.check_progress()
            self.runtime.save(self.out / "final")
            self.checkpoints.finish(steps)
        return self.result

    def _step(self, step: int) -> None:
        last = step == self.experiment.steps
        values, batch = self.runtime.step(step)
        values |= self.checkpoints.metrics()
        try:
            if last or self.runtime.evaluation_due(step):
                values |= self._evaluate(step)
            if last:
                values |= self._calibrate_after()
        finally:  # a step that was made is on record, also when the evaluation after it fails
            self._log(step, values)
        for record in self.runtime.readable(batch, self.experiment.sample_prompts):
            self.records.samples.write({"step": step, **record})
        if self.console is not None and step % (self.experiment.print_samples_every_steps or step + 1) == 0:
            show(self.console, step, self.runtime.readable(batch, SHOWN))
        self.saves.after_step(step, values, last=last)

    def _log(self, step: int, values: dict[str, float]) -> None:
        self.result.history.append({"step": step, **values})
        for receiver in self.receivers:
            receiver.log(step, values)

    def _evaluate(self, step: int) -> dict[str, float]:
        measured, self.result.samples = self.runtime.evaluate()
        for record in self.result.samples:
            self.records.eval_samples.write({"step": step, **record})
        return measured

    def _calibrate_after(self) -> dict[str, float]:
        if self.experiment.calibration is None or not self.experiment.calibration.after:
            return {}
        self.runtime.check_progress()
        self.runtime.save(self.out / "final")  # a calibration that fails costs no training
        self.checkpoints.keep_interfaces()
        return self.runtime.calibrate("after")

    def _stopped(self, step: int) -> str:
        message = f"stopped after step {step} of {self.experiment.steps}"
        if self.experiment.checkpoint is None:
            return f"{message}; it cannot be gone on with, since checkpoint=null"
        if problems := self.checkpoints.close():
            return f"{message}; {'; '.join(problems)}"
        return f"{message}; go on with resume=auto"

    def _say(self, text: str) -> None:
        if self.console is not None:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class _Checkpoints:
    """The checkpoints of a run: when they are due, what goes in, and what could not be written."""

    def __init__(self, runtime: LocalRuntime, records: Records, saves: Saves, frozen: Mapping[str, Any]) -> None:
        self._runtime, self._records, self._saves, self._frozen = runtime, records, saves, frozen
        self._spec = runtime.experiment.checkpoint
        self._writer: CheckpointWriter | None = None
        if self._spec is not None:
            self._writer = CheckpointWriter(runtime.experiment.output_dir / CHECKPOINTS, self._spec.keep)
        self._last = time.monotonic()
        self._stalled: dict[str, float] = {}
        self._interfaces: dict[str, Any] | None = None
        self._problems: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if not isinstance(value, KeyboardInterrupt):  # whoever interrupts does not want to wait
            _warn_of(self.close())

    def begin(self) -> None:
        """Write one before the first step: where models are saved, there is something to go on from."""
        if self._writer is not None:
            self._write(0)
            self._writer.close()

    def after_step(self, step: int, *, now: bool) -> None:
        """Write one if it is due, or `now`, or if this is the best step so far."""
        now = now or self._saves.best_step == step
        if self._spec is not None and (now or self._spec.due(step, time.monotonic() - self._last)):
            self._write(step)

    def finish(self, step: int) -> None:
        """Write the last one: that it is there says that the run is done, with its models saved."""
        if self._spec is not None:
            self._write(step)

    def metrics(self) -> dict[str, float]:
        """`time/checkpoint_s`, once, when one was written before the step that has just been made."""
        stalled, self._stalled = self._stalled, {}
        return stalled

    def keep_interfaces(self) -> None:
        """Take the interfaces as they are now into the next one, whatever is done with them until then."""
        self._interfaces = interface_states(self._runtime)

    def close(self) -> list[str]:
        """Wait until the last one is written; returns what could not be, if it has not been said."""
        if self._writer is not None:
            self._writer.close()
        return self._take_problems()

    def _write(self, step: int) -> None:
        assert self._writer is not None
        started = time.perf_counter()
        _warn_of(self._take_problems())
        try:
            state = run_state(self._runtime, self._frozen)
            state |= {"records": self._records.state_dict(), "saves": self._saves.state_dict()}
            if self._interfaces is not None:
                state["interfaces"] = self._interfaces
            self._writer.write(step, state, best=self._saves.best_step)
        except (OSError, ValueError) as error:  # a full disk; a value of an interface that cannot be kept
            self._problems.append(f"the checkpoint of step {step} was not written: {error}")
        self._last = time.monotonic()
        self._stalled = {"time/checkpoint_s": time.perf_counter() - started}

    def _take_problems(self) -> list[str]:
        problems, self._problems = self._problems, []
        return problems + (self._writer.failed() if self._writer is not None else [])


def _warn_of(problems: Iterable[str]) -> None:
    for problem in problems:
        warnings.warn(problem, stacklevel=3)


def _draw(name: str, result: RunResult) -> None:
    if len(result.history) < 2:
        return
    try:
        draw_curves({name: result.history}, result.output_dir / "curves.png", title=name)
    except Exception as error:  # a picture neither ends a run nor hides what did
        warnings.warn(f"curves.png was not drawn: {error}", stacklevel=2)

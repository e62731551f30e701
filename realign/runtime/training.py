"""`TrainingLoop`: execute the steps of a run, with records, evaluations, saved models, checkpoints and signals."""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from realign.api import DataflowGraph, ModelInterface, SequenceSample
from realign.api.callback import EndEvent, EndStatus, StartEvent
from realign.own_files import replace_text
from realign.ranks import current, is_on_all_ranks
from realign.records.checkpoint.folder import Start
from realign.records.checkpoint.saved_models import Saves
from realign.records.checkpoint.serialize import pack
from realign.records.diagnosis import LIKELY, Cause, RunRecords, diagnose
from realign.records.evidence import RECENT
from realign.records.metrics.curves import draw_curves
from realign.records.metrics.details import RunDetails
from realign.records.metrics.live_display import LiveDisplay
from realign.records.metrics.records import Records
from realign.records.metrics.samples import SHOWN, show
from realign.records.metrics.shown_metrics import headline, panels, targets
from realign.records.metrics.trackers import BestEffortTracker, Tracker
from realign.records.recorded_calls import CallRecorder
from realign.runtime.callbacks.run_callbacks import RunCallbacks, Stop, settings_of
from realign.runtime.experiment import CheckpointPart, Experiment
from realign.runtime.local import LocalRuntime
from realign.runtime.output_folder import take_output_folder
from realign.runtime.processes.watchdog import Watch, WorkerHangs, WorkerLost
from realign.runtime.reference_cache import write_references
from realign.runtime.resume import DYNAMIC_SAMPLING, settings_hash
from realign.runtime.rollout.dynamic_sampling import TaskSolved
from realign.runtime.run_checkpoints import (
    RunCheckpoints,
    config_of,
    continue_from,
    frozen_weights,
    interface_states,
)
from realign.runtime.run_report import RunInfo, RunReport, parent_record
from realign.signals import Interrupted, StopSignals


def activity(watch: Watch, graph: DataflowGraph, interfaces: Mapping[str, ModelInterface], *, first_step: bool) -> str:
    """Return the current operation and its duration; empty between two operations.

    Args:
        watch: tracks the operations.
        graph: names the calls.
        interfaces: tell which calls run functions in worker processes instead of a model.
        first_step: whether no step is finished yet, so that calls may wait for workers to start.
    """
    operations = watch.operations()
    if not operations:
        return ""
    current = operations[-1]
    starts = ""
    for rpc in graph.rpcs:
        if first_step and current.what == f"call {rpc.name!r}":
            starts = "" if interfaces[rpc.model].needs_engine else ", which starts its workers"
            starts = f" for the first time{starts}"
    return f"running {current.what}{starts}, {current.seconds:.0f} s"


_MOST_SAMPLED = 400
"""Samples of training that a diagnosis during the run looks at, the latest ones."""


@dataclass
class RunResult:
    """Result of a run: its folder, metrics and held-out samples."""

    output_dir: Path
    history: list[dict[str, float]] = field(default_factory=list)
    """One record per step: `step` and its metrics (step 0: before training)."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Held-out responses after training, with prompt, response and reward."""
    stopped: str | None = None
    """Config key of the callback that stopped the run, or `dynamic_sampling`, and the reason; None if all steps are
    done."""

    def series(self, metric: str) -> list[float]:
        """Return the values of one metric, over the steps that have it."""
        return [record[metric] for record in self.history if metric in record]


class TrainingLoop:
    """A run in progress: its runtime, files, trackers and checkpoints."""

    def __init__(
        self,
        runtime: LocalRuntime,
        start: Start | None,
        console: Console | None,
        trackers: Iterable[Tracker],
        report: RunReport,
        stack: ExitStack,
    ) -> None:
        """Restore the checkpoint of `start`, and open files and trackers, which `stack` closes."""
        self.report = report
        self.experiment, self.out = runtime.experiment, runtime.experiment.output_dir
        self.runtime, self.ranks = runtime, current()
        self.console = console if self.ranks.leader else None
        self.first = 1 if start is None else start.step + 1
        self.complete = start is not None and start.complete
        self.done = self.first - 1
        self.fresh = start is None or start.new_run
        e = self.experiment
        self.saves = Saves(self.out, runtime.save, e.save_every_steps, e.keep_saves, e.save_best, self.ranks)
        # before `restore`, because the hash covers the initial weights of a policy that serves as its own reference
        frozen = frozen_weights(runtime) if e.checkpoint is not None or start is not None else {}
        if start is not None:
            continue_from(start, runtime, frozen, e.resume_skip)
            if not start.new_run:
                self.saves.load_state_dict(start.state["saves"])
            left = f"Next step: {self.first} of {e.steps}." if self.first <= e.steps else "No step is left."
            self._say_and_log(f"Resumed from {start.checkpoint.path}. {left}")
        self.callbacks = RunCallbacks(e.callbacks, self.ranks)
        if start is not None and CheckpointPart.callbacks not in e.resume_skip and "callbacks" in start.state:
            self.callbacks.load_state_dict(start.state["callbacks"], stopped=start.complete)
        if e.checkpoint is not None:  # fail at startup if the state is not serializable
            pack({"interfaces": interface_states(runtime), "callbacks": self.callbacks.state_dict()}, copy=False)
        # after loading and restoring, so that a start that fails there leaves the earlier run as it was
        self.ranks.lead(partial(take_output_folder, e, fresh=start is None or not start.own))
        if e.cached_roles:
            self.ranks.lead(partial(write_references, runtime.models, self.out))
        self.result = RunResult(self.out)
        if e.records.calls and self.ranks.leader:
            runtime.hook = CallRecorder(self.out, e.graph, starts_workers=e.runtime.starts_workers)
        self.records: Records | None = None
        self.details: RunDetails | None = None
        self.info: RunInfo | None = None
        self.receivers: list[Tracker] = []
        self.warned: set[str] = set()
        self.sampled: deque[dict[str, Any]] = deque(maxlen=_MOST_SAMPLED)
        self.result.history = self.ranks.lead(partial(self._open_files, start, trackers, stack))
        self.checkpoints = stack.enter_context(
            RunCheckpoints(runtime, self.records, self.saves, self.callbacks, frozen)
        )

    def _open_files(self, start: Start | None, trackers: Iterable[Tracker], stack: ExitStack) -> list[dict[str, float]]:
        """Open the files and trackers, on rank 0 only, and return the metrics of earlier steps."""
        self.report.log.open(self.out, fresh=start is None or not start.own)
        # registered before the files and trackers, so that they are closed before the slow plot
        stack.callback(  # also draw the curves of an interrupted run
            _draw, self.experiment, self.result, self.callbacks.metrics
        )
        records = self.records = stack.enter_context(
            Records(self.out, start, settings_hash(config_of(self.experiment)))
        )
        lead = self.experiment.lead_role
        decode = self.runtime.models[lead].tokenizer.decode
        details = RunDetails(self.experiment.records, lead, decode, self.runtime.spans, records, self.report.log)
        self.details = stack.enter_context(details)
        fresh = start is None or not start.own or self.fresh
        parent = None if start is None or start.own or self.fresh else parent_record(start.run, start.step)
        command = self.report.command
        recorded = records.recorded
        self.info = RunInfo(self.out, self.runtime, command, self.first, fresh=fresh, parent=parent, recorded=recorded)
        if recorded > self.done and max(self.info.tracked.values(), default=-1) > self.done:
            self._say_and_log(
                f"Steps {self.first} to {recorded} run again. Trackers keep their earlier values; metrics.jsonl has "
                "the new ones."
            )
        if self.experiment.resolved:
            text = yaml.safe_dump(dict(self.experiment.resolved), sort_keys=False, allow_unicode=True)
            replace_text(self.out / "config.yaml", text)
        # those of the caller last: one that raises must not cost the line of the step, nor what others get of it
        self.receivers = [records.metrics, *self._open_trackers(stack), *trackers]
        return [] if self.fresh else records.history()

    def _open_trackers(self, stack: ExitStack) -> Iterable[Tracker]:
        for name, spec in self.experiment.trackers.items():
            assert self.info is not None
            tracker = BestEffortTracker(name, spec.open(self.experiment.name, self.out), self.info.tracked[name])
            stack.callback(tracker.close)
            yield tracker
        yield self.report.log
        if self.console is not None:
            display = stack.enter_context(self._display(self.console))
            self.report.before_panel = display.close
            yield BestEffortTracker("display", display)

    def _display(self, console: Console) -> LiveDisplay:
        e = self.experiment
        log = self.report.log
        models = ((role, model.engine) for role, model in self.runtime.models.items() if model.has_engine)
        sizes = [f"{role}: {about}" for role, engine in models if (about := engine.capabilities().size)]

        def describe_activity() -> str:
            return activity(self.runtime.watch, e.graph, e.interfaces, first_step=self.done < self.first)

        return LiveDisplay(
            console,
            e.name,
            e.steps,
            headline(e.graph, e.interfaces, e.lead_role, tuple(e.evaluations)),
            header=[f"{self.out}   {', '.join(sizes)}".rstrip()],
            added=self.callbacks.metrics,
            targets=targets(e.graph, e.interfaces, e.lead_role),
            activity=describe_activity,
            warned=lambda: (tuple(log.latest_warnings), log.warnings),
        )

    def run(self) -> RunResult:
        """Execute the remaining steps.

        Returns:
            The result. Its `stopped` contains the reason if a callback stopped the run.
        """
        e = self.experiment
        try:
            self.callbacks.start(StartEvent(e.name, self.out, e.steps, self.first, resumed=not self.fresh))
            if self.fresh:
                self._before_training()
            with StopSignals(quiet=not self.ranks.leader) as signals, _ended_by(signals):
                try:
                    for step in range(self.first, e.steps + 1) if not self.complete else ():
                        if self.callbacks.stop is not None:  # by the evaluation before training, or by the last step
                            break
                        try:
                            self._step(step)
                        except TaskSolved as solved:
                            settings = settings_of(e.dynamic_sampling)
                            self.callbacks.stop = Stop(DYNAMIC_SAMPLING, str(solved), settings)
                            self._calibrate_after()
                            break
                        if step < e.steps and self.callbacks.stop is None:
                            # ranks get a signal at different times; they agree, or one would wait in a step that the
                            # others do not make
                            if (received := self.ranks.first(signals.received)) is not None:
                                raise Interrupted(
                                    received, f"stopped after step {step} of {e.steps}. {self._save_last_step()}"
                                )
                            self.checkpoints.after_step(step)
                    self._finish()
                except (Interrupted, WorkerLost, WorkerHangs):  # it is saved, nobody waits for it, or no worker answers
                    raise
                except BaseException as error:
                    self._keep(error)
                    raise
        except WorkerLost:
            raise  # the run may continue in another attempt
        except BaseException as error:
            self.report_error(error)
            raise
        status = EndStatus.completed if self.callbacks.stop is None else EndStatus.stopped
        end = EndEvent(self.done, e.steps, status, self.result.stopped or "")
        self.callbacks.end(end)
        self._report(end)
        return self.result

    def report_error(self, error: BaseException) -> None:
        """Report an error that ends the run to the callbacks, and write the summary."""
        status = EndStatus.interrupted if isinstance(error, KeyboardInterrupt) else EndStatus.failed
        end = EndEvent(self.done, self.experiment.steps, status, str(error))
        self.callbacks.end_after_error(end)
        self._report(end)

    def _report(self, end: EndEvent) -> None:
        """Write and show the summary, on rank 0 only."""
        if self.info is not None and self.records is not None:
            self.info.end(end, self.callbacks.metrics)
            self.report.end(self.experiment, end, self.result.history, self.records.metrics.seconds, self.console)

    def _before_training(self) -> None:
        """Calibrate and evaluate before the first step, and write a checkpoint if the run may need it."""
        added: dict[str, float] = {}
        before = self.runtime.calibrate("before") | self._evaluate(0, added) | added
        self._log(0, before)
        self.saves.after_step(0, before, last=False)
        if self.experiment.save_every_steps or self.experiment.save_best or self.experiment.runtime.starts_workers:
            self.checkpoints.begin()

    def _finish(self) -> None:
        """Save the trained models and the last checkpoint."""
        if self.complete:  # only `final` is missing or damaged
            self._calibrate_after()
        if self.callbacks.stop is not None:
            self.result.stopped = self.callbacks.stop.describe()
        if self.done:
            self.runtime.check_progress()
        # before the checkpoint, which stores the hashes of these files and thereby says that the run is complete
        self.saves.final()
        self.checkpoints.finish(self.done)

    def _step(self, step: int) -> None:
        steps = self.experiment.steps
        spec = self.experiment.records
        self.runtime.trace_prompts = spec.token_prompts if spec.due(step) else 0
        with self.checkpoints.step(step):
            values, batch = self.runtime.step(step)
        # what only rank 0 does goes through `lead`: were it to fail there, the other ranks would wait for rank 0
        self.ranks.lead(partial(self.runtime.hook.end, step))
        values |= self.checkpoints.metrics()
        added: dict[str, float] = {}
        try:
            if due := self.runtime.evaluations_due(step):
                values |= self._evaluate(step, added, due)
            added |= self.callbacks.after_step(step, steps, values, added)
            if self.fresh and step == 1:
                self.ranks.lead(self.callbacks.check_reads)
            # a stop makes this the last step, after which all evaluations are due
            last = step == steps or self.callbacks.stop is not None
            if last and (left := [where for where in self.experiment.all_evaluations if where not in due]):
                values |= self._evaluate(step, added, left)
            if last:
                values |= self._calibrate_after()
            values = self.ranks.broadcast(values | added)  # timings differ between ranks, and `save_best` may use one
        except BaseException:  # log a completed step even if its evaluation fails, perhaps on this rank alone
            self._log(step, values, alone=True)
            raise
        self._log(step, values)
        self.ranks.lead(partial(self._show, step, batch))
        self.saves.after_step(step, values, last=last)
        # last, so that the spans of the evaluations and saves of this step are among its own
        self.ranks.lead(partial(self._write_details, step, batch))

    def _log(self, step: int, values: dict[str, float], *, alone: bool = False) -> None:
        """Add the metrics of a step to the history, and log them on rank 0; collective unless `alone`."""
        # all steps share the strings of the names, which would otherwise be most of the memory of a long run's history
        self.result.history.append({"step": step, **{sys.intern(name): value for name, value in values.items()}})

        def send() -> None:
            for receiver in self.receivers:
                receiver.log(step, values)

        if alone:
            send()
        else:
            self.ranks.lead(send)
        # after the log, so that a summary never counts a step that metrics.jsonl lacks
        self.done = step

    def _show(self, step: int, batch: SequenceSample) -> None:
        """Warn if the run does not learn, and write and show samples; on rank 0."""
        self._warn()
        assert self.records is not None
        for record in self.runtime.readable(batch, self.experiment.sample_prompts):
            self.records.samples.write({"step": step, **record})
            self.sampled.append({"step": step, **record})
        if self.console is not None and step % (self.experiment.print_samples_every_steps or step + 1) == 0:
            show(self.console, step, self.runtime.readable(batch, SHOWN))

    def _write_details(self, step: int, batch: SequenceSample) -> None:
        """Write the details of a step; on rank 0."""
        assert self.details is not None
        self.details.after_step(step, batch, self.runtime.traces)

    def _warn(self) -> None:
        """Warn once about each cause that keeps the run from learning, and that is not just possible."""
        if self.done % RECENT:
            return
        for cause in self._diagnose():
            if cause.sure >= LIKELY and cause.name not in self.warned:
                self.warned.add(cause.name)
                warnings.warn(cause.text(), stacklevel=2)

    def _diagnose(self) -> Sequence[Cause]:
        """Return what keeps the run from learning."""
        records = RunRecords(self.result.history, self.experiment.resolved or {}, [*self.sampled], self.result.samples)
        return diagnose(records).causes

    def _evaluate(self, step: int, added: dict[str, float], due: Sequence[str] | None = None) -> dict[str, float]:
        """Run evaluations and return their metrics. Adds the metrics of the callbacks to `added`.

        Args:
            step: the step.
            added: metrics of the callbacks, which this extends.
            due: config keys of the evaluations to run; None runs all of them.
        """
        measured, self.result.samples = self.runtime.evaluate(due)
        self.ranks.lead(partial(self._write_samples, step))
        if measured:
            added |= self.callbacks.after_evaluation(step, self.experiment.steps, measured, self.result.samples)
        return measured

    def _write_samples(self, step: int) -> None:
        """Write the samples of an evaluation; on rank 0."""
        assert self.records is not None
        for record in self.result.samples:
            self.records.eval_samples.write({"step": step, **record})

    def _calibrate_after(self) -> dict[str, float]:
        if self.experiment.calibration is None or not self.experiment.calibration.after:
            return {}
        self.runtime.check_progress()
        self.saves.final()  # before a calibration that may fail
        self.checkpoints.keep_interfaces()
        return self.runtime.calibrate("after")

    def _save_last_step(self) -> str:
        """Write the checkpoint of the last complete step, and return how to continue from it."""
        if self.experiment.checkpoint is None:
            return "The run cannot be resumed, since checkpoint=null."
        problems = self.checkpoints.keep()
        return "" if problems is None else "; ".join(problems) or "Continue with resume=auto."

    def _keep(self, error: BaseException) -> None:
        """Write the checkpoint of the last complete step after an error, if all ranks can."""
        if not is_on_all_ranks(error):  # the others are in the step, and wait for this rank
            return
        try:
            if kept := self._save_last_step():
                self._say_and_log(f"Step {self.done} of {self.experiment.steps} is the last complete one. {kept}")
        except Exception as second:  # it must not hide the first one
            warnings.warn(f"The checkpoint of step {self.done} was not written ({second}).", stacklevel=2)

    def _say_and_log(self, text: str) -> None:
        self._say(text)
        self.report.log.write(text)

    def _say(self, text: str) -> None:
        if self.console is not None:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _ended_by(signals: StopSignals) -> Iterator[None]:
    """Report lost workers as an interruption after a signal, because the signal may have killed them as well."""
    try:
        yield
    except WorkerLost as lost:
        if signals.received is None:
            raise
        raise Interrupted(signals.received, f"stopped during a step ({lost})") from lost


def _draw(experiment: Experiment, result: RunResult, added: Mapping[str, str]) -> None:
    if len(result.history) < 2:
        return
    try:
        reported = dict.fromkeys(name for record in result.history for name in record if name != "step")
        charts = panels(experiment.graph, experiment.interfaces, experiment.lead_role, reported, added)
        path = result.output_dir / "curves.png"
        draw_curves({experiment.name: result.history}, path, title=experiment.name, panels=charts)
    except Exception as error:  # a failed plot neither stops the run nor hides its error
        warnings.warn(f"curves.png was not drawn ({error}). The run is not affected.", stacklevel=2)

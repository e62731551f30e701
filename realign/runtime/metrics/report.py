"""`RunReport`: the log of a run and the summary at its end, with the commands to continue."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from realign.api.callback import EndEvent, EndStatus
from realign.engines.distributed.ranks import command_words
from realign.errors import ConfigError
from realign.runtime.checkpoint.final_models import FINAL
from realign.runtime.checkpoint.folder import CHECKPOINTS
from realign.runtime.checks.during_training import signs
from realign.runtime.experiment import Experiment
from realign.runtime.metrics.run_log import NAME as LOG
from realign.runtime.metrics.run_log import RunLog
from realign.runtime.metrics.shown_metrics import courses, headline
from realign.runtime.metrics.summary import RunSummary
from realign.runtime.models import lead_role

RESULTS: Mapping[str, str] = {
    "models": FINAL,
    "best models": "best",
    "samples": "samples.jsonl",
    "held-out samples": "eval_samples.jsonl",
    "metrics": "metrics.jsonl",
    "log": LOG,
}
"""Name of each result in the folder of a run, by its meaning."""


@dataclass
class RunReport:
    """The log and the summary of a run. The same report serves all attempts of a run."""

    command: Sequence[str] | None = None
    """Command line that started the run, without `resume`; None for a run that was not started by a command."""
    log: RunLog = field(default_factory=RunLog)
    """The log file."""
    before_panel: Callable[[], None] | None = None
    """Called before the summary is shown; closes the live display."""

    def end(
        self,
        experiment: Experiment,
        event: EndEvent,
        history: Sequence[Mapping[str, float]],
        seconds: float,
        console: Console | None,
    ) -> None:
        """Write the summary to its file and the log, and show it unless the run failed."""
        summary = self.summary(experiment, event, history, seconds)
        try:
            summary.write(experiment.output_dir)
        except (OSError, ConfigError) as error:  # ConfigError: the path is a link or a pipe
            warnings.warn(f"summary.json was not written ({error}). The run is not affected.", stacklevel=2)
        if event.status is EndStatus.failed:
            return
        self.log.write(f"end of the run\n{summary.text()}")
        if console is not None:
            with suppress(OSError):  # the output may be a file on a full disk; the log has the summary too
                if self.before_panel is not None:
                    self.before_panel()
                summary.show(console)

    def summary(
        self, experiment: Experiment, event: EndEvent, history: Sequence[Mapping[str, float]], seconds: float
    ) -> RunSummary:
        """Return the summary of a run."""
        e, out = experiment, experiment.output_dir
        files = {meaning: str(out / name) for meaning, name in RESULTS.items() if _exists(out / name)}
        if e.checkpoint is not None and event.step:  # written in the background
            files["checkpoints"] = str(out / CHECKPOINTS)
        if len(history) > 1:  # drawn when the run is closed
            files["curves"] = str(out / "curves.png")
        known = {} if e.save_best is None else {e.save_best.removeprefix("-"): not e.save_best.startswith("-")}
        found = tuple(signs(history).values())
        return RunSummary(
            name=e.name,
            status=event.status,
            reason=event.reason,
            step=event.step,
            steps=e.steps,
            seconds=seconds,
            metrics=courses(history, headline(e.graph, e.interfaces, lead_role(e), tuple(e.evaluations)), known),
            warnings=self.log.warnings,
            files=files,
            next_commands=self._next_commands(experiment, event, learns=not found),
            findings=found,
        )

    def _next_commands(self, experiment: Experiment, event: EndEvent, *, learns: bool) -> dict[str, str]:
        found: dict[str, str] = {}
        lead = lead_role(experiment)
        model = experiment.output_dir / FINAL / lead
        outputs = experiment.models[lead].facts().outputs if lead in experiment.models else None
        if event.status is not EndStatus.interrupted and (outputs is None or "logprobs" in outputs) and _exists(model):
            found["chat with the model"] = f"realign chat {shlex.quote(str(model))}"
        if self.command is None or experiment.checkpoint is None:
            return found
        words = {
            EndStatus.interrupted: ("continue", []),
            EndStatus.completed: ("train for more steps", [f"steps={2 * experiment.steps}"]),
            EndStatus.stopped: ("continue", [f"{event.reason.partition(':')[0]}=null"]),
        }.get(event.status)
        if words is not None and (learns or event.status is not EndStatus.completed):  # more steps would not help
            meaning, more = words
            keys = {word.partition("=")[0] for word in more}
            keys |= {"overwrite"}
            kept = [word for word in self.command if word.partition("=")[0] not in keys]
            found[meaning] = shlex.join([*command_words(), *kept, "resume=auto", *more])
        kept = [word for word in self.command if word.partition("=")[0] not in ("overwrite", "output_dir")]
        found["check another setting"] = shlex.join(["realign", "check", *kept, "KEY=VALUE"])
        return found


def _exists(path: Path) -> bool:
    if path.is_dir():
        return any(path.iterdir())
    return path.is_file() and path.stat().st_size > 0


__all__ = ["RunReport"]

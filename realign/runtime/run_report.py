"""What a run reports about itself: run.json at its start, and the log and summary.json at its end."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import platform
import re
import shlex
import socket
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from realign.api import DataflowGraph
from realign.api.callback import EndEvent, EndStatus
from realign.own_files import read_regular, replace_text
from realign.ranks import command_words
from realign.records.checkpoint.folder import CHECKPOINTS
from realign.records.checkpoint.saved_models import FINAL
from realign.records.diagnosis import diagnosis_of
from realign.records.metrics.run_log import NAME as LOG
from realign.records.metrics.run_log import RunLog
from realign.records.metrics.shown_metrics import MetricSummary, headline, metric_summaries, number, panels
from realign.runtime.experiment import Experiment
from realign.runtime.local import LocalRuntime
from realign.version import installed_version, version_of

RUN_JSON, SUMMARY_JSON = "run.json", "summary.json"
PACKAGES = ("torch", "transformers", "numpy", "datasets", "ray", "peft", "flash-attn")
"""Other packages whose versions are recorded."""
_LARGEST_JSON = 64 << 20
"""Size in bytes above which a run.json counts as damaged."""


class RunInfo:
    """Writes run.json at the start and at the end of an attempt. A failed write is a warning.

    Args:
        folder: folder of the run.
        runtime: the loaded run.
        command: words of the command line; None for a run that was not started by a command.
        first: first step of this attempt.
        fresh: whether this is a new run, whose file replaces an earlier one.
        parent: run, its id, and the step from which a new run continues.
        recorded: last step in metrics.jsonl before this attempt.

    Attributes:
        tracked: last step that each tracker got in an earlier attempt; -1 if none.
    """

    def __init__(
        self,
        folder: Path,
        runtime: LocalRuntime,
        command: Sequence[str] | None,
        first: int,
        *,
        fresh: bool,
        parent: Mapping[str, Any] | None = None,
        recorded: int = -1,
    ) -> None:
        earlier = [] if fresh else attempts_in(folder)
        self._folder = folder
        self._attempt: dict[str, Any] = {
            "command": None if command is None else [*command_words(), *command],
            "started": _now(),
            # both stay null if the process is killed
            "ended": None,
            "status": None,
            "reason": "",
            "first_step": first,
            "last_step": first - 1,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        before = {} if fresh else run_json(folder)
        had = before.get("trackers", {})
        # an earlier attempt may have got further than the one before this
        trackers = runtime.experiment.trackers
        self.tracked = {name: max(recorded, int(had[name])) if name in had else -1 for name in trackers}
        # a random one, and not the folder: both a run and its forks may be moved
        self._content = _describe(runtime) | {
            "id": before.get("id") or uuid.uuid4().hex,
            "parent": parent or before.get("parent"),
            "attempts": [*earlier, self._attempt],
            "trackers": self.tracked,
        }
        self._write()

    def end(self, event: EndEvent, own: Iterable[str] = ()) -> None:
        """Record how the attempt ended, and the metrics that callbacks added, among the first that pages show."""
        first, *rest = self._content["headline"] or [""]
        self._content["headline"] = [*filter(None, dict.fromkeys((first, *own, *rest)))]
        self._attempt |= {"ended": _now(), "status": str(event.status), "reason": event.reason}
        self._attempt["last_step"] = event.step
        self._write()

    def _write(self) -> None:
        text = json.dumps(self._content, indent=1, ensure_ascii=False, default=str)
        try:
            replace_text(self._folder / RUN_JSON, f"{text}\n")
        except OSError as error:
            warnings.warn(f"{RUN_JSON} was not written ({error}). The run is not affected.", stacklevel=3)


def attempts_in(folder: Path) -> list[dict[str, Any]]:
    """Return the attempts in the run.json of a folder; none if it is missing or damaged."""
    with suppress(LookupError, TypeError, ValueError):
        return [dict(attempt) for attempt in run_json(folder)["attempts"]]
    return []


def run_json(folder: Path) -> dict[str, Any]:
    """Return the run.json of a folder; empty if it is missing or damaged."""
    with suppress(ValueError, TypeError, RecursionError):
        return dict(json.loads(read_regular(folder / RUN_JSON, _LARGEST_JSON)))
    return {}


def parent_record(run: Path, step: int) -> dict[str, Any]:
    """Return what the run.json of a fork says about the run that it continues after `step`."""
    return {"run": str(run), "id": run_json(run).get("id"), "step": step}


def parent_of(run: Path) -> tuple[Path, int] | None:
    """Return the run that a run continues, and after which step; None if it continues none.

    A parent that isn't where it was is looked for beside the run, also under another name, since both may have been
    moved. If it isn't there either, the folder is the one beside the run that has its name.
    """
    try:
        parent = run_json(run)["parent"]
        folder, step = Path(parent["run"]), int(parent["step"])
    except (LookupError, TypeError, ValueError, OverflowError):  # OverflowError: 1e999
        return None
    beside = run.parent / folder.name
    for place in (folder, beside):
        if place.is_dir() and _is_parent(parent, place):
            return place, step
    others = (path for path in sorted(run.parent.iterdir()) if path != run and (path / RUN_JSON).is_file())
    named = parent.get("id") is not None
    return next((path for path in others if named and _is_parent(parent, path)), beside), step


def _is_parent(parent: Mapping[str, Any], folder: Path) -> bool:
    """Return whether a folder contains the run that a fork names as its parent. Earlier versions wrote no id."""
    recorded = run_json(folder).get("id")
    return recorded is None or parent.get("id") in (None, recorded)


def _describe(runtime: LocalRuntime) -> dict[str, Any]:
    e = runtime.experiment
    models = ((role, model.engine) for role, model in runtime.models.items() if model.has_engine)
    lead = e.lead_role
    larger_is_better = {} if e.save_best is None else {e.save_best.removeprefix("-"): not e.save_best.startswith("-")}
    return {
        "name": e.name,
        "steps": e.steps,
        "batch_prompts": e.batch_prompts,
        "seed": e.seed,
        "folder": str(Path.cwd()),
        "versions": {
            "python": platform.python_version(),
            "realign": installed_version(),
            **{name: v for name in PACKAGES if (v := version_of(name))},
        },
        "device": _device(),
        "git": git_state(Path.cwd()),
        "functions": dict(e.sources),
        "models": {role: engine.capabilities().size for role, engine in models},
        "graph": _graph_record(e.graph),
        "headline": headline(e.graph, e.interfaces, lead, tuple(e.evaluations)),
        "panels": [dataclasses.asdict(panel) for panel in panels(e.graph, e.interfaces, lead)],
        "larger_is_better": larger_is_better,
    }


def _graph_record(graph: DataflowGraph) -> dict[str, Any]:
    """Return a graph as plain values, from which a report builds it again."""
    return {
        "rpcs": [
            {
                "name": rpc.name,
                "model": rpc.model,
                "method": rpc.method,
                "inputs": rpc.inputs,
                "outputs": rpc.outputs,
                "after": rpc.after,
            }
            for rpc in graph.rpcs
        ],
        "dataset_keys": graph.dataset_keys,
        "results": graph.results,
        "sync": {role: dataclasses.asdict(sync) for role, sync in graph.sync.items()},
    }


def git_state(folder: Path) -> Mapping[str, Any] | None:
    """Return commit and branch of the git repository of a folder; None without one.

    Git itself isn't run: it would run programs that the repository configures, which may be somebody else's. So which
    files were changed isn't known.
    """
    found = (path for parent in (folder, *folder.parents) if os.path.lexists(path := parent / ".git"))
    if (git := next(found, None)) is None:
        return None
    if git.is_file():  # of a worktree or submodule
        git = git.parent / _git_text(git).removeprefix("gitdir: ")
    branch, commit = "HEAD", _git_text(git / "HEAD")
    if commit.startswith("ref: refs/"):
        name = commit.removeprefix("ref: ")
        branch, commit = name.removeprefix("refs/heads/"), _git_commit(git, name)
    if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", commit) is None:
        return None
    return {"commit": commit, "branch": branch}


def _git_commit(git: Path, name: str) -> str:
    """Return the commit of a reference; empty if it has none yet."""
    shared = git / _git_text(git / "commondir")  # a worktree's references are in the repository
    if ".." in Path(name).parts:
        return ""
    if commit := _git_text(git / name) or _git_text(shared / name):
        return commit
    lines = (line.partition(" ") for line in _git_text(shared / "packed-refs", _LARGEST_JSON).splitlines())
    return next((commit for commit, _, ref in lines if ref == name), "")


def _git_text(path: Path, limit: int = 4096) -> str:
    return read_regular(path, limit).decode(errors="replace").strip()


def _device() -> dict[str, Any]:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "machine": f"{platform.system()} {platform.machine()}",
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpus": gpus,
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class RunSummary:
    """The end of a run."""

    name: str
    """Name of the run."""
    status: EndStatus
    """How the run ended."""
    reason: str
    """Why it ended before its last step; empty otherwise."""
    step: int
    """Last completed step."""
    steps: int
    """Steps that the config asks for."""
    seconds: float
    """Duration, including the time before the checkpoint of a resumed run."""
    metrics: tuple[MetricSummary, ...]
    """Headline metrics, the evaluations first."""
    warnings: int
    """Number of warnings in realign.log."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path of each result that exists, by its meaning."""
    next_commands: Mapping[str, str] = field(default_factory=dict)
    """Commands to continue with, by their meaning."""
    diagnosis: str = ""
    """What keeps the run from learning, in one sentence; empty if nothing does."""

    def write(self, folder: Path) -> None:
        """Write summary.json. Values that are not finite become null."""
        values = dataclasses.asdict(self)
        for metric in values["metrics"]:
            metric.update(
                {key: None for key, value in metric.items() if isinstance(value, float) and not math.isfinite(value)}
            )
        text = json.dumps(values, indent=2, ensure_ascii=False, default=str)
        replace_text(folder / SUMMARY_JSON, f"{text}\n")

    def headline(self) -> str:
        """Return the first line of the summary."""
        done = f"{self.step:,} of {self.steps:,} steps in {duration(self.seconds)}"
        if self.status is EndStatus.completed:
            return f"{self.name}: {done}"
        return f"{self.name}: {self.status} after {done}"

    def show(self, console: Console) -> None:
        """Print the summary. The commands are below its frame and on one line each, so that they can be copied."""
        console.print(self._panel())
        width = max(map(len, self.next_commands), default=0)
        for meaning, command in self.next_commands.items():
            console.print(Text.assemble((f"{meaning:<{width}}", "bold"), "  ", command), soft_wrap=True)

    def _panel(self) -> Panel:
        parts: list[Table | Text] = []
        if self.status is EndStatus.stopped:
            parts += [Text(self.reason), Text()]
        if self.metrics:
            parts += [_course_table(self.metrics), Text()]
        if self.diagnosis:
            parts += [Text(self.diagnosis, style="yellow"), Text()]
        files = Table.grid(padding=(0, 2))
        for meaning, path in self.files.items():
            files.add_row(Text(meaning, style="bold"), Text(path, overflow="fold"))
        if self.warnings:
            files.add_row(
                Text("warnings", style="bold yellow"), Text(f"{self.warnings}, see {self.files.get('log', '')}")
            )
        parts.append(files)
        style = "green" if self.status is EndStatus.completed and not self.diagnosis else "yellow"
        return Panel(Group(*parts), title=Text(self.headline()), title_align="left", border_style=style)

    def text(self) -> str:
        """Return the summary as plain text."""
        console = Console(width=110, record=True, file=io.StringIO(), color_system=None, force_jupyter=False)
        self.show(console)
        return console.export_text().rstrip()


def duration(seconds: float) -> str:
    """Return a duration such as `3 min 12 s`."""
    total = round(seconds)
    hours, minutes, rest = total // 3600, total // 60 % 60, total % 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _course_table(metrics: Sequence[MetricSummary]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("metric", "first", "best", "last"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for metric in metrics:
        best = "" if metric.best is None else f"{number(metric.best)} (step {metric.best_step:,})"
        table.add_row(Text(metric.name), number(metric.first), best, number(metric.last))
    return table


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
        except OSError as error:
            warnings.warn(f"summary.json was not written ({error}). The run is not affected.", stacklevel=2)
        if event.status is EndStatus.failed:
            return
        self.log.write(f"end of the run\n{summary.text()}")
        if console is not None:
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
        shown = headline(e.graph, e.interfaces, e.lead_role, tuple(e.evaluations))
        diagnosis = diagnosis_of(out)
        wrong = diagnosis.sentence if diagnosis.causes else ""
        return RunSummary(
            name=e.name,
            status=event.status,
            reason=event.reason,
            step=event.step,
            steps=e.steps,
            seconds=seconds,
            metrics=metric_summaries(history, shown, known),
            warnings=self.log.warnings,
            files=files,
            next_commands=self._next_commands(experiment, event, learns=not wrong),
            diagnosis=wrong,
        )

    def _next_commands(self, experiment: Experiment, event: EndEvent, *, learns: bool) -> dict[str, str]:
        folder = shlex.quote(str(experiment.output_dir))
        commands = {"look at curves and samples": f"realign view {folder}"}
        if not learns:
            commands["see why"] = f"realign why {folder}"
        lead = experiment.lead_role
        model = experiment.output_dir / FINAL / lead
        outputs = experiment.models[lead].facts().outputs if lead in experiment.models else None
        if event.status is not EndStatus.interrupted and (outputs is None or "logprobs" in outputs) and _exists(model):
            commands["chat with the model"] = f"realign chat {shlex.quote(str(model))}"
        if self.command is None or experiment.checkpoint is None:
            return commands
        words = {
            EndStatus.interrupted: ("continue", []),
            EndStatus.completed: ("train for more steps", [f"steps={2 * experiment.steps}"]),
            # the reason starts with the key of the callback, see `Stop.describe`
            EndStatus.stopped: ("continue", [f"{event.reason.partition(':')[0]}=null"]),
        }.get(event.status)
        if words is not None and (learns or event.status is not EndStatus.completed):  # more steps would not help
            meaning, more = words
            keys = {word.partition("=")[0] for word in more}
            keys |= {"overwrite"}
            words_left = [word for word in self.command if word.partition("=")[0] not in keys]
            commands[meaning] = shlex.join([*command_words(), *words_left, "resume=auto", *more])
        # the keys of resuming have no effect without `resume`
        of_this_run = ("overwrite", "output_dir", "resume_allow", "resume_skip")
        words_left = [word for word in self.command if word.partition("=")[0] not in of_this_run]
        commands["check another setting"] = shlex.join(["realign", "check", *words_left, "KEY=VALUE"])
        return commands


def _exists(path: Path) -> bool:
    if path.is_dir():
        return any(path.iterdir())
    return path.is_file() and path.stat().st_size > 0

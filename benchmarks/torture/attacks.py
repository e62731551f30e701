"""Attacks on a run: a fault, the exit codes that are right for it, and the comparison with the undisturbed run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from benchmarks.torture.faulty_code import CODE
from benchmarks.torture.runs import GATES, Launch, Run, are_equal, differences
from realign.demo.arithmetic import prepare
from realign.demo.tiny import Task
from realign.errors import ExitCode

STEPS, PROMPTS, RESPONSES = 6, 8, 4
LONGEST_S = 240
"""Seconds after which an attacked process counts as hung, and that it may need for one step."""
COMMON = (
    f"steps={STEPS}",
    f"batch_prompts={PROMPTS}",
    f"sample_prompts={PROMPTS}",
    f"interfaces.actor.generation.n={RESPONSES}",
    "checkpoint.every_steps=1",
    "threads=1",
    "resume=auto",
    "models.actor.path=TASK/model",
    "data.path=TASK/prompts.jsonl",
)
REWARDED = (
    "experiment=grpo_arithmetic",
    "evaluation.every_steps=3",
    "evaluation.batch_prompts=16",
    "evaluation.data.path=TASK/held_out.jsonl",
)
"""Responses of one turn, scored by a function that further settings name."""
SETTINGS = (*REWARDED, "interfaces.reward.function=CODE/reward.py:score", "interfaces.reward.workers=0")
"""A run that scores its responses in its own process."""


@dataclass
class Scene:
    """A run under attack. An attack changes the fields; they apply to its own process only."""

    folder: Path
    task: Task
    run: Run
    reference: Run
    code: Path
    """Folder with the files of `faulty_code`."""
    stack: ExitStack
    """Undoes, after the last process, what the attacks did outside the folder."""
    more: list[str] = field(default_factory=list)
    """Further arguments of the command line."""
    environment: dict[str, str] = field(default_factory=dict)
    """Further environment variables."""
    prefix: list[str] = field(default_factory=list)
    """Command that executes the command line."""
    launch: Launch | None = None
    """The process, while it runs."""


Act: TypeAlias = Callable[[Scene], None]


class NotPossible(Exception):
    """This machine does not allow the attack; the text is the reason."""


def nothing(_: Scene) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Attack:
    """One process under attack."""

    name: str
    """Fault, in words."""
    codes: tuple[int, ...] = (0,)
    """Exit codes that are right: 0 if the run continues; otherwise those of the table of exit codes."""
    says: str = ""
    """Regular expression that the output contains."""
    before: Act = nothing
    """Called before the process starts. Raises `NotPossible` if the machine does not allow the attack."""
    at: Mapping[int, Act] = field(default_factory=dict)
    """Called while the rewards of a step are computed, by step."""
    after: Act = nothing
    """Ends the fault, once the process has ended."""
    tracebacks: bool = False
    """Whether the output may contain tracebacks, such as that of a failed reward function."""


@dataclass(frozen=True)
class Series:
    """Attacks on one run folder, after which the run is resumed without a fault and compared."""

    name: str
    attacks: Sequence[Attack]
    settings: tuple[str, ...] = SETTINGS
    """Settings of the run in addition to `COMMON`. In them, TASK and CODE are folders."""
    twin: tuple[str, ...] = ()
    """Settings of the undisturbed run, if they are others."""
    before: Act = nothing
    """Called once, before the first attack."""
    last: Act = nothing
    """Called before the process starts that resumes the run, and changes its `environment`."""


@dataclass(frozen=True)
class Result:
    """Result of one attack."""

    series: str
    name: str
    code: int | None = None
    """Exit code of the attacked process; None if it was not started or hung."""
    problem: str = ""
    """Why the attack was not survived; empty if it was."""
    not_possible: str = ""
    """Why the attack was not tried; empty if it was."""
    lost: int = 0
    """Recorded samples of the undisturbed run that are missing or doubled after the series."""


class Lab:
    """Executes series of attacks in a folder, and the undisturbed runs once for each setting.

    Args:
        folder: folder of all runs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.task = prepare(folder / "task", seed=0, demonstrations=64, held_out=64)
        self._code = folder / "code"
        self._code.mkdir(exist_ok=True)
        for file, text in CODE.items():
            (self._code / file).parent.mkdir(exist_ok=True)
            (self._code / file).write_text(text)
        self._references: dict[tuple[str, ...], Run] = {}

    def execute(self, series: Series) -> list[Result]:
        """Execute the attacks, then let the run finish and compare it with the undisturbed run."""
        reference = self.undisturbed(series.twin or series.settings)
        run = self.run(re.sub(r"\W+", "_", series.name), (*COMMON, *series.settings))
        folder = run.mark.parent
        with ExitStack() as stack:
            scene = Scene(folder, self.task, run, reference, self._code, stack)
            try:
                series.before(scene)
            except NotPossible as reason:
                return [Result(series.name, attack.name, not_possible=str(reason)) for attack in series.attacks]
            results = [self._attack(series, attack, scene) for attack in series.attacks]
            tried = [result for result in results if not result.not_possible]
            if not tried:
                return results
            lost, problem = self._recover(
                scene, series, resume=tried[-1].code != 0 or not (run.folder / "final").exists()
            )
        return [
            r if r.not_possible else replace(r, problem="; ".join(filter(None, (r.problem, problem))), lost=lost)
            for r in results
        ]

    def undisturbed(self, settings: tuple[str, ...]) -> Run:
        """Return the undisturbed run with these settings."""
        if settings not in self._references:
            run = self.run(f"undisturbed_{len(self._references)}", (*COMMON, *settings, "checkpoint.keep=6"))
            with Launch(run) as launch:
                launch.finish()
            self._references[settings] = run
        return self._references[settings]

    def run(self, name: str, settings: Sequence[str]) -> Run:
        """Return a run in a new folder. In the settings, TASK and CODE are folders."""
        folder = self.folder / name
        folder.mkdir()
        words = [
            word.replace("TASK", str(self.folder / "task")).replace("CODE", str(self._code))
            for word in (*settings, f"output_dir={folder / 'run'}")
        ]
        return Run(folder / "run", [sys.executable, "-m", "realign", *words], folder / "run.mark")

    def _attack(self, series: Series, attack: Attack, scene: Scene) -> Result:
        scene.more, scene.environment, scene.prefix = [], {}, []
        try:
            attack.before(scene)
        except NotPossible as reason:
            return Result(series.name, attack.name, not_possible=str(reason))
        for old in scene.folder.glob("run.mark.*"):
            old.unlink()
        calls = {(step - 1) * PROMPTS * RESPONSES + 1: act for step, act in attack.at.items()}
        scene.environment[GATES] = " ".join(map(str, calls))
        hung = ""
        with Launch(scene.run, scene.more, scene.environment, scene.prefix) as launch:
            scene.launch = launch
            try:
                for call, act in calls.items():
                    reached, gate = (scene.folder / f"run.mark.{word}.{call}" for word in ("reached", "open"))
                    if launch.wait_until(reached.exists, 0.01, LONGEST_S):
                        act(scene)
                        gate.touch()
                code: int | None = launch.process.wait(LONGEST_S)
            except (RuntimeError, subprocess.TimeoutExpired):
                code, hung = None, f"hung for {LONGEST_S} s"
        attack.after(scene)
        text = launch.log.read_text(errors="replace")
        return Result(series.name, attack.name, code, hung or problem_in(attack, code, text))

    def _recover(self, scene: Scene, series: Series, *, resume: bool) -> tuple[int, str]:
        """Let the run finish without a fault; return the number of samples lost and the differences in words."""
        scene.environment = {}
        series.last(scene)
        if resume:
            with Launch(scene.run, environment=scene.environment) as launch:
                try:
                    launch.finish()
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    return len(scene.reference.samples()), f"it cannot be resumed ({_last_line(str(error))})"
        different = differences(scene.run, scene.reference)
        if are_equal(different):
            return 0, ""
        lost = different["samples_lost"] + different["samples_doubled"]
        unequal = [name for name in ("metrics", "weights") if not different[f"{name}_equal"]] + ["samples"] * bool(lost)
        return lost, f"other {', '.join(unequal)} than the undisturbed run"


def problem_in(attack: Attack, code: int | None, text: str) -> str:
    """Return what is wrong with the end of an attacked process; empty if it ended as documented."""
    if code not in attack.codes:
        return f"exit code {code} ({_last_line(text)})"
    if "Traceback (most recent call last)" in text and not attack.tracebacks:
        return f"a traceback ({_last_line(text)})"
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    if len(errors) != (code in (ExitCode.error, ExitCode.transient)):
        return f"{len(errors)} lines of errors"
    if any(len(line) > 2000 for line in errors):
        return f"an error of {max(map(len, errors))} characters"
    if attack.says and not re.search(attack.says, " ".join(text.split())):
        return f"the output does not contain {attack.says!r}"
    return ""


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


def keep_copy(scene: Scene) -> None:
    """Copy the run folder, for `restore_copy`."""
    shutil.copytree(scene.run.folder, scene.folder / "copy")


def restore_copy(scene: Scene) -> None:
    """Replace the run folder by its copy."""
    shutil.rmtree(scene.run.folder)
    shutil.copytree(scene.folder / "copy", scene.run.folder)

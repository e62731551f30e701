"""Sweeps: `realign -m <overrides>` starts a run for each combination of values, here or as jobs of submitit.

All runs are composed first, so that a mistake ends the sweep before its first run.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from realign.cli.arguments import without_names
from realign.cli.exit_codes import run_guarded
from realign.cli.train import Start, build, is_one_of_many, record_launch
from realign.config.composition import Composed, compose_layers, parse_sweep
from realign.config.errors import ConfigError
from realign.config.hydra_settings import DEFAULT_LAUNCHER, OF_ALL_EXECUTORS, OF_SUBMITIT
from realign.own_files import make_folder
from realign.report.compare import count_states, format_settings, mean, seed_groups
from realign.runtime.run_report import SUMMARY_JSON
from realign.safe_yaml import load_yaml

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

_SLURM = "submitit_slurm"
_UNFINISHED = "not finished"


def sweep(words: Sequence[str], config_dir: str | None, start: Start, debug: bool) -> int:
    """Start the runs of a sweep, and print their table.

    Args:
        words: Overrides of the command line.
        config_dir: As for `compose`.
        start: Runs an experiment.
        debug: Whether to print the traceback of every error.

    Returns:
        The exit code.

    Raises:
        ConfigError: a run is invalid; names the key.
    """
    shared, runs = compose_runs(words, config_dir)
    for run in runs:
        run.resolve()

    def start_runs(launcher: Launcher) -> None:
        size = launcher.batch or len(runs)
        for first in range(0, len(runs), size):
            launcher.launch(runs[first : first + size])

    return launch_all(shared, start, debug, start_runs)


def launch_all(shared: Composed, start: Start, debug: bool, start_runs: Callable[[Launcher], None]) -> int:
    """Let `start_runs` launch runs that share the overrides of `shared`, print their table, and return the exit code.

    Raises:
        ConfigError: the sweep cannot start.
    """
    _check(shared)
    launcher = Launcher(shared, start, debug)
    try:
        start_runs(launcher)
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        if (table := sweep_table(launcher.folders)) is not None:
            Console().print(table)
    return 0


def compose_runs(words: Sequence[str], config_dir: str | None) -> tuple[Composed, list[Composed]]:
    """Compose the overrides that all runs of a sweep share, and each run.

    Raises:
        ConfigError: a run is invalid; names the key.
    """
    shared, given = sweep_overrides(words, config_dir)
    hydra = [str(override.input_line) for override in given if override.is_hydra_override()]
    choices = [_choices(override) for override in given if not override.is_hydra_override()]
    return shared, [compose_layers([*hydra, *run], config_dir) for run in product(*choices)]


def sweep_overrides(words: Sequence[str], config_dir: str | None) -> tuple[Composed, list[Override]]:
    """Compose the words that all runs of a sweep share, and return the overrides of its runs.

    The overrides are those of `hydra.sweeper.params` and of the words, of which each key has the last one.

    Raises:
        ConfigError: a word is invalid, or varies a setting of Hydra.
    """
    given = parse_sweep(words := without_names(words, config_dir))
    if swept := [override for override in given if override.is_sweep_override() and override.is_hydra_override()]:
        raise ConfigError(f"{swept[0].input_line}: a sweep cannot vary settings of Hydra. Choose one value.")
    shared = compose_layers(
        [word for word, override in zip(words, given, strict=True) if not override.is_sweep_override()], config_dir
    )
    params = (shared.hydra.get("sweeper") or {}).get("params") or {}
    parsed = parse_sweep([f"{key}={_text(values)}" for key, values in params.items()])
    of_files = [override for override in parsed if not override.is_hydra_override()]
    return shared, list({override.get_key_element(): override for override in [*of_files, *given]}.values())


def _text(values: Any) -> str:
    return ",".join(map(str, values)) if isinstance(values, list) else str(values)


def _choices(override: Override) -> list[str]:
    """Return the override itself, or one override per value of a sweep."""
    from hydra.core.override_parser.types import Glob

    key = override.get_key_element()
    if isinstance(override.value(), Glob):
        raise ConfigError(f"{override.input_line}: glob is not supported. List the values: {key}=a,b.")
    if not override.is_sweep_override():
        return [str(override.input_line)]
    if not override.is_discrete_sweep():
        raise ConfigError(
            f"{override.input_line}: a sweep lists its values: {key}=a,b. --trials N searches an interval."
        )
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def _check(composed: Composed) -> None:
    """Check that a sweep can start."""
    for word in composed.overrides:
        if word.lstrip("+").startswith("resume="):
            raise ConfigError(
                f"{word}: a sweep (-m) always starts new runs. Resume the runs of a sweep one by one, with resume=auto "
                "and the output_dir of the run."
            )
    if is_one_of_many():
        raise ConfigError(
            "-m: a sweep cannot run under torchrun, which starts the ranks of one run. Start each run separately."
        )
    if composed.launcher == _SLURM and not shutil.which("srun"):
        raise ConfigError(
            f"hydra/launcher={_SLURM}: the command srun was not found. Start the sweep on a Slurm cluster, or use "
            "hydra/launcher=submitit_local."
        )


@dataclass(frozen=True)
class _Job:
    """A run of a sweep, in this process or in one that submitit starts."""

    run: Composed
    folder: str
    start: Start
    debug: bool
    again: bool = False

    def __call__(self) -> int:
        """Execute the run, and return its exit code."""
        config = self.run.resolve()
        config.output_dir = self.folder  # each run of a sweep has a separate folder
        if self.again:
            config.resume = "auto"
        checked = partial(record_launch, self.run, self.folder)
        return run_guarded(lambda: self.start(config, build(config), checked), self.debug)

    def checkpoint(self) -> Any:
        """Return what submitit starts again after the time limit of a job (`max_num_timeout`)."""
        import submitit

        return submitit.helpers.DelayedSubmission(replace(self, again=True))


class Launcher:
    """Starts runs of a sweep."""

    def __init__(self, shared: Composed, start: Start, debug: bool) -> None:
        """Choose the folder of the sweep; the arguments are those of `launch_all`."""
        self.folders: list[Path] = []
        """Folders of the runs so far."""
        self._shared, self._start, self._debug = shared, start, debug
        # once, so that the time that `${now:...}` stands for is that of all runs
        self._folder = Path(str(shared.with_hydra().hydra.sweep.dir)).absolute()

    @property
    def batch(self) -> int | None:
        """Number of runs to launch at once; None if the config leaves it open."""
        size: int | None = self._shared.hydra.get("sweeper", {}).get("max_batch_size")
        return size

    def launch(self, runs: Sequence[Composed]) -> list[Path]:
        """Start runs, wait for them, and return their folders.

        Raises:
            SystemExit: a run failed, with its exit code.
        """
        folders = [self._folder / str(len(self.folders) + i) for i in range(len(runs))]
        jobs = [_Job(run, str(folder), self._start, self._debug) for run, folder in zip(runs, folders, strict=True)]
        if self._shared.launcher == DEFAULT_LAUNCHER:
            for job in jobs:
                self.folders.append(Path(job.folder))
                if code := job():
                    raise SystemExit(code)
        else:
            self.folders += folders
            self._submit(jobs)
        return folders

    def _submit(self, jobs: Sequence[_Job]) -> None:
        """Run jobs with submitit, and wait for all of them."""
        try:
            import submitit
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"hydra/launcher={self._shared.launcher} needs {error.name}. Run pip install 'realign-rl[slurm]'."
            ) from error

        cluster = self._shared.launcher.removeprefix("submitit_")
        given = {**OF_SUBMITIT[self._shared.launcher], **self._shared.hydra.get("launcher", {})}
        settings = {key if key in OF_ALL_EXECUTORS else f"{cluster}_{key}": x for key, x in given.items()}
        retries = {key: settings.pop(key) for key in ("slurm_max_num_timeout",) if key in settings}
        make_folder(self._folder)
        executor = submitit.AutoExecutor(self._folder / ".submitit" / "%j", cluster, **retries)
        executor.update_parameters(**settings)
        with executor.batch():
            submitted = [executor.submit(job) for job in jobs]
        codes = []
        for number, job in enumerate(submitted):
            codes.append(job.result())  # raises the error of submitit for a job without a result
            if codes[-1]:
                last = ((job.stderr() or "").strip().splitlines() or ["see its log"])[-1]
                sys.stderr.write(f"{jobs[number].folder}: exit code {codes[-1]}: {last}\n")
        if code := next(filter(None, codes), 0):
            raise SystemExit(code)


@dataclass(frozen=True)
class SweptRun:
    """A run of a sweep."""

    folder: Path
    """Folder of the run."""
    overrides: Mapping[str, str]
    """Value of each override."""
    summary: Mapping[str, Any] | None
    """Content of summary.json; None if the run did not end."""

    @classmethod
    def read(cls, folder: Path) -> SweptRun:
        """Read the overrides and the summary of a run from its folder."""
        record = folder / ".hydra" / "overrides.yaml"
        words = load_yaml(record.read_text(encoding="utf-8")) if record.is_file() else []
        path, summary = folder / SUMMARY_JSON, None
        with suppress(ValueError):  # cut off by a full disk
            summary = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        return cls(folder, dict(word.lstrip("+").partition("=")[::2] for word in words or []), summary)

    def best(self, metric: str) -> float | None:
        """Return the best value of the metric of `save_best`; None if it was never measured."""
        courses = (self.summary or {}).get("metrics", ())
        return next((course["best"] for course in courses if course["name"] == metric), None)


def sweep_table(folders: Sequence[Path]) -> RenderableType | None:
    """Return the table of the runs in `folders`; None if there are none.

    Runs that differ only in their seeds are one row, with the mean over the seeds and its standard error.
    """
    runs = [SweptRun.read(folder) for folder in folders if folder.is_dir()]
    if not runs:
        return None
    groups = [[runs[i] for i in group] for group in seed_groups([run.overrides for run in runs])]
    first = [group[0] for group in groups] if len(groups) > 1 else runs
    keys = list(dict.fromkeys(key for run in first for key in run.overrides))
    varied = [key for key in keys if len({run.overrides.get(key) for run in first}) > 1]
    settings = [format_settings(run.overrides, varied) for run in first]
    if len(groups) < len(first):
        groups, settings = [*([run] for run in runs), runs], [*settings, f"{len(runs)} seeds"]
    metric = _metric(runs)
    parent, here = folders[0].absolute().parent, Path.cwd()
    shown = parent.relative_to(here) if parent.is_relative_to(here) else parent
    means = ", mean ± standard error over seeds" if any(len(group) > 1 for group in groups) else ""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("run", *(["settings"] if varied else [])):
        table.add_column(column, overflow="fold")
    table.add_column("status", min_width=len("completed"))
    for column in ("steps", *(("first", "best", "last") if metric is not None else ())):
        table.add_column(column, justify="right", no_wrap=True)
    for group, setting in zip(groups, settings, strict=True):
        cells = [", ".join(run.folder.name for run in group), *([setting] if varied else [])]
        cells += [
            *_end(group),
            *(_mean(group, metric, part) for part in ("first", "best", "last") if metric is not None),
        ]
        table.add_row(*map(Text, cells))
    title = Text(f"{len(runs)} runs in {shown}" + (f": {metric}{means}" if metric is not None else ""), overflow="fold")
    return Group(title, table, Text(f"Settings: {', '.join(varied)}" if varied else "", overflow="fold"))


def _metric(runs: Sequence[SweptRun]) -> str | None:
    """Return the most important metric that all finished runs have; None if there is none."""
    measured = [[metric["name"] for metric in run.summary["metrics"]] for run in runs if run.summary is not None]
    return next((name for name in measured[0] if all(name in names for names in measured)), None) if measured else None


def _end(group: Sequence[SweptRun]) -> list[str]:
    ends = [
        (_UNFINISHED, "") if (end := run.summary) is None else (str(end["status"]), str(end["step"])) for run in group
    ]
    return [count_states([status for status, _ in ends]), ", ".join(dict.fromkeys(step for _, step in ends if step))]


def _mean(group: Sequence[SweptRun], name: str, part: str) -> str:
    courses = [metric for run in group for metric in (run.summary or {}).get("metrics", ()) if metric["name"] == name]
    values = [course[part] for course in courses if course.get(part) is not None]
    return mean(values) + (f" (n={len(values)})" if 0 < len(values) < len(group) else "")

"""Trackers: receivers of the metrics of each step, such as TensorBoard and Weights & Biases.

Each adapter of an experiment tracker needs an extra. All but TensorBoard get the resolved config at the start and a
table of the latest samples at the end.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

from typing_extensions import override

from realign.errors import ConfigError
from realign.safe_yaml import load_yaml
from realign.settings import Settings


class Tracker(Protocol):
    """A sink for the metrics of each step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of `step` (0: before training)."""
        ...

    def close(self) -> None:
        """Flush the metrics and release resources."""
        ...


class BestEffortTracker:
    """A tracker wrapper that turns failures into warnings, so that they never stop a run.

    Args:
        name: Name of the tracker, for messages.
        tracker: Wrapped tracker.
        has: Last step that the tracker got before the run was resumed. It keeps the values of steps up to there:
            Weights & Biases would drop them silently if they came again, and MLflow would show them twice.
    """

    def __init__(self, name: str, tracker: Tracker, has: int = -1) -> None:
        self.name = name
        self._tracker, self._has = tracker, has
        self._missed: list[int] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Forward the metrics to the tracker. Warn about the first failure and count later ones."""
        if step <= self._has:
            return
        try:
            self._tracker.log(step, metrics)
        except Exception as error:
            self._missed.append(step)
            if len(self._missed) == 1:
                what = f"Tracker {self.name!r} failed at step {step} ({type(error).__name__}: {error})"
                warnings.warn(f"{what}. Training continues; metrics.jsonl contains this step.", stacklevel=2)

    def close(self) -> None:
        """Close the tracker, and warn about the number of steps that it missed."""
        try:
            self._tracker.close()
        except Exception as error:
            warnings.warn(f"Tracker {self.name!r} could not be closed ({type(error).__name__}: {error}).", stacklevel=2)
        if self._missed:
            first, last = self._missed[0], self._missed[-1]
            n = len(self._missed)
            warnings.warn(f"Tracker {self.name!r} missed {n} steps, from {first} to {last}.", stacklevel=2)


SAMPLES = "samples.jsonl"
COLUMNS = ("step", "prompt", "response", "reward")
"""Columns of the table of samples."""
LATEST = 200
"""Number of samples in the table."""


class TrackerSpec(Protocol):
    """Config of a tracker, such as `TensorBoard`, which opens the tracker of a run."""

    def open(self, name: str, output_dir: Path) -> Tracker:
        """Open a tracker with the name `name` for the run in `output_dir`."""
        ...


@dataclass
class TensorBoard(TrackerSpec):
    """Write event files for TensorBoard (extra `tensorboard`); view them with `tensorboard --logdir runs`."""

    folder: str | None = None
    """Folder of the event files, in a subfolder with the name of the run. null: `tensorboard` in the run's folder."""

    def __post_init__(self) -> None:
        # here too, so that a missing package is an error of the config and not one after loading
        _extra("torch.utils.tensorboard", "tensorboard")

    @override
    def open(self, name: str, output_dir: Path) -> Tracker:
        folder = Path(self.folder, name) if self.folder is not None else output_dir / "tensorboard"
        return _EventFile(_extra("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder)))


@dataclass
class ProjectTracker(Settings, TrackerSpec, ABC):
    """A tracker whose runs belong to a project, with the interface of Weights & Biases."""

    project: str = "realign"
    """Name of the tracker's project."""
    group: str | None = None
    """Group name under which the tracker shows related runs; null means no group."""
    package: ClassVar[str] = ""
    """Name of the Python package, and of its extra."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _extra(self.package, self.package)

    @override
    def open(self, name: str, output_dir: Path) -> Tracker:
        library = _extra(self.package, self.package)
        shared = {"project": self.project, "group": self.group, "name": name, "config": _config(output_dir)}
        run = library.init(**shared, **self.start_options(output_dir), **self._identity(_id(output_dir)))
        return _Run(run, partial(self.samples_table, library), output_dir)

    def _identity(self, run: str | None) -> dict[str, Any]:
        """Return the arguments by which a resumed run continues its run of the tracker."""
        return {} if run is None or f"{self.package.upper()}_RUN_ID" in os.environ else {"id": run, "resume": "allow"}

    @abstractmethod
    def start_options(self, output_dir: Path) -> dict[str, Any]:
        """Return the further arguments with which the library starts a run."""

    def samples_table(self, library: Any, rows: list[list[Any]]) -> Any:
        """Return samples as the library's table."""
        return library.Table(columns=list(COLUMNS), data=rows)


class WandbMode(StrEnum):
    """Where Weights & Biases stores a run."""

    online = "online"
    offline = "offline"


@dataclass
class WandB(ProjectTracker):
    """Log to Weights & Biases, including the resolved config (extra `wandb`). Log in with `wandb login`."""

    mode: WandbMode = WandbMode.online
    """`online` uploads during the run; `offline` writes files that `wandb sync` uploads later."""
    package: ClassVar[str] = "wandb"

    @override
    def start_options(self, output_dir: Path) -> dict[str, Any]:
        return {"dir": str(output_dir), "mode": self.mode.value}


@dataclass
class Trackio(ProjectTracker):
    """Log to Trackio, on this machine or to a Space of the hub (extra `trackio`). `trackio show` shows the runs."""

    space: str | None = None
    """Space of the Hugging Face hub, such as `name/space`; null stores the runs on this machine."""
    package: ClassVar[str] = "trackio"

    @override
    def _identity(self, run: str | None) -> dict[str, Any]:
        return {"resume": "allow"}  # it continues the run of its name

    @override
    def start_options(self, output_dir: Path) -> dict[str, Any]:
        return {"space_id": self.space, "embed": False}  # embed would open a dashboard in a notebook


class SwanLabMode(StrEnum):
    """Where SwanLab stores a run."""

    online = "online"
    local = "local"
    offline = "offline"


@dataclass
class SwanLab(ProjectTracker):
    """Log to SwanLab (extra `swanlab`). Log in with `swanlab login`."""

    mode: SwanLabMode = SwanLabMode.online
    """`online` uploads during the run; `local` is for `swanlab watch`; `offline` writes files for `swanlab sync`."""
    package: ClassVar[str] = "swanlab"

    @override
    def _identity(self, run: str | None) -> dict[str, Any]:
        # only its server knows earlier runs; its older versions accept ids of 21 characters only
        return super()._identity(run and run[:21]) if self.mode is SwanLabMode.online else {}

    @override
    def start_options(self, output_dir: Path) -> dict[str, Any]:
        return {"log_dir": str(output_dir / "swanlab"), "mode": self.mode.value}

    def samples_table(self, library: Any, rows: list[list[Any]]) -> Any:
        """Return samples as texts, since SwanLab has no table of text."""
        return [library.Text(_text(row)) for row in rows]


@dataclass
class MLflow(TrackerSpec):
    """Log to MLflow (extra `mlflow`)."""

    experiment: str = "realign"
    """Name of the MLflow experiment."""
    tracking_uri: str | None = None
    """Server or database. null: `MLFLOW_TRACKING_URI` of the environment, else `mlflow.db` in the current folder."""

    def __post_init__(self) -> None:
        _extra("mlflow", "mlflow")

    @override
    def open(self, name: str, output_dir: Path) -> Tracker:
        client = _extra("mlflow", "mlflow").MlflowClient(self.tracking_uri)
        return _MlflowRun(client, self.experiment, name, output_dir)


class _EventFile:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for metric, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(metric, value, step)
        # its own interval is two minutes, which a killed run would lose
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Run:
    """A run of a tracker with the interface of Weights & Biases."""

    def __init__(self, run: Any, table: Callable[[list[list[Any]]], Any], output_dir: Path) -> None:
        self._run, self._table, self._output_dir = run, table, output_dir

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        try:
            if rows := _samples(self._output_dir):
                self._run.log({"samples": self._table(rows)})
        finally:
            self._run.finish()


class _MlflowRun:
    def __init__(self, client: Any, experiment: str, name: str, output_dir: Path) -> None:
        self._client, self._output_dir = client, output_dir
        known = self._client.get_experiment_by_name(experiment)
        at = known.experiment_id if known is not None else self._client.create_experiment(experiment)
        # MLflow chooses the id of a run, so it is found by a tag
        own = _id(output_dir) or ""
        found = self._client.search_runs([at], f"tags.{_MLFLOW_TAG} = '{own}'", max_results=1) if own else []
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(at, run_name=name, tags={_MLFLOW_TAG: own}).info.run_id
        self._metric = _extra("mlflow.entities", "mlflow").Metric
        self._client.log_dict(self._id, _config(output_dir), "config.yaml")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        values = [self._metric(_mlflow_name(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)

    def close(self) -> None:
        try:
            if rows := _samples(self._output_dir):
                table = dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
                self._client.log_table(self._id, table, "samples.json")
        finally:
            self._client.set_terminated(self._id)


_MLFLOW_TAG = "realign_run"
"""Tag of MLflow with the id of the run."""


def _mlflow_name(metric: str) -> str:
    """Return the name of a metric without characters that MLflow rejects, such as the `@` of `eval/pass@4`."""
    return re.sub(r"[^\w\-./ ]", "_", metric.replace("@", "_at_"))


def _config(output_dir: Path) -> dict[str, Any]:
    """Return the resolved config of a run."""
    resolved = output_dir / "config.yaml"
    return load_yaml(resolved.read_text(encoding="utf-8")) if resolved.is_file() else {}


def _id(output_dir: Path) -> str | None:
    """Return the id of the run, which it keeps when it is resumed; None if run.json could not be written."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return str(json.loads((output_dir / "run.json").read_bytes())["id"])
    return None


def _samples(output_dir: Path) -> list[list[Any]]:
    """Return the latest samples of a run, in the order of `COLUMNS`."""
    path = output_dir / SAMPLES
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()[-LATEST:]
    return [[json.loads(line).get(column) for column in COLUMNS] for line in lines]


def _text(row: Sequence[Any]) -> str:
    return "\n".join(f"{column}: {value}" for column, value in zip(COLUMNS, row, strict=True))


def _extra(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"The tracker needs {extra} ({error}). Run pip install 'realign-rl[{extra}]'.") from error

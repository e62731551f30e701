"""Adapters of experiment trackers to the `Tracker` protocol; each needs an extra.

All but TensorBoard get the resolved config at the start and a table of the latest samples at the end.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import yaml

from realign.errors import ConfigError
from realign.runtime.metrics.live_display import Tracker
from realign.settings import Settings

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
class TensorBoard:
    """Write event files for TensorBoard (extra `tensorboard`); view them with `tensorboard --logdir runs`."""

    folder: str | None = None
    """Folder of the event files, in a subfolder with the name of the run. null: `tensorboard` in the run's folder."""

    def __post_init__(self) -> None:
        _extra("torch.utils.tensorboard", "tensorboard")

    def open(self, name: str, output_dir: Path) -> Tracker:
        """Open the event file."""
        folder = Path(self.folder, name) if self.folder is not None else output_dir / "tensorboard"
        return _EventFile(_extra("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder)))


class WandbMode(StrEnum):
    """Where Weights & Biases stores a run."""

    online = "online"
    offline = "offline"


@dataclass
class WandB(Settings):
    """Log to Weights & Biases, including the resolved config (extra `wandb`). Log in with `wandb login`."""

    project: str = "realign"
    """Name of the Weights & Biases project."""
    group: str | None = None
    """Group name under which Weights & Biases shows related runs; null means no group."""
    mode: WandbMode = WandbMode.online
    """`online` uploads during the run; `offline` writes files that `wandb sync` uploads later."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _extra("wandb", "wandb")

    def open(self, name: str, output_dir: Path) -> Tracker:
        """Start the run."""
        wandb = _extra("wandb", "wandb")
        run = wandb.init(
            project=self.project,
            group=self.group,
            name=name,
            dir=str(output_dir),
            mode=self.mode.value,
            config=_config(output_dir),
        )
        return _Run(run, lambda rows: run.log({"samples": wandb.Table(columns=list(COLUMNS), data=rows)}), output_dir)


@dataclass
class Trackio(Settings):
    """Log to Trackio, on this machine or to a Space of the hub (extra `trackio`). `trackio show` shows the runs."""

    project: str = "realign"
    """Name of the Trackio project."""
    group: str | None = None
    """Group name of related runs; null means no group."""
    space: str | None = None
    """Space of the Hugging Face hub, such as `name/space`; null stores the runs on this machine."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _extra("trackio", "trackio")

    def open(self, name: str, output_dir: Path) -> Tracker:
        """Start the run."""
        trackio = _extra("trackio", "trackio")
        run = trackio.init(
            project=self.project,
            group=self.group,
            name=name,
            space_id=self.space,
            config=_config(output_dir),
            resume="allow",
            embed=False,
        )
        return _Run(run, lambda rows: run.log({"samples": trackio.Table(columns=list(COLUMNS), data=rows)}), output_dir)


class SwanLabMode(StrEnum):
    """Where SwanLab stores a run."""

    online = "online"
    local = "local"
    offline = "offline"


@dataclass
class SwanLab(Settings):
    """Log to SwanLab (extra `swanlab`). Log in with `swanlab login`."""

    project: str = "realign"
    """Name of the SwanLab project."""
    group: str | None = None
    """Group name of related runs; null means no group."""
    mode: SwanLabMode = SwanLabMode.online
    """`online` uploads during the run; `local` is for `swanlab watch`; `offline` writes files for `swanlab sync`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _extra("swanlab", "swanlab")

    def open(self, name: str, output_dir: Path) -> Tracker:
        """Start the run."""
        swanlab = _extra("swanlab", "swanlab")
        run = swanlab.init(
            project=self.project,
            group=self.group,
            name=name,
            log_dir=str(output_dir / "swanlab"),
            mode=self.mode.value,
            config=_config(output_dir),
        )
        return _Run(run, lambda rows: run.log({"samples": [swanlab.Text(_text(row)) for row in rows]}), output_dir)


@dataclass
class MLflow:
    """Log to MLflow (extra `mlflow`)."""

    experiment: str = "realign"
    """Name of the MLflow experiment."""
    tracking_uri: str | None = None
    """Server or database. null: `MLFLOW_TRACKING_URI` of the environment, else `mlflow.db` in the current folder."""

    def __post_init__(self) -> None:
        _extra("mlflow", "mlflow")

    def open(self, name: str, output_dir: Path) -> Tracker:
        """Start the run."""
        client = _extra("mlflow", "mlflow").MlflowClient(self.tracking_uri)
        return _MlflowRun(client, self.experiment, name, output_dir)


class _EventFile:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for metric, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(metric, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Run:
    """A run of a tracker with the interface of Weights & Biases."""

    def __init__(self, run: Any, add_table: Callable[[list[list[Any]]], None], output_dir: Path) -> None:
        self._run, self._add_table, self._output_dir = run, add_table, output_dir

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        if rows := _samples(self._output_dir):
            self._add_table(rows)
        self._run.finish()


class _MlflowRun:
    def __init__(self, client: Any, experiment: str, name: str, output_dir: Path) -> None:
        self._client, self._output_dir = client, output_dir
        known = self._client.get_experiment_by_name(experiment)
        at = known.experiment_id if known is not None else self._client.create_experiment(experiment)
        self._id = self._client.create_run(at, run_name=name).info.run_id
        self._metric = _extra("mlflow.entities", "mlflow").Metric
        self._client.log_dict(self._id, _config(output_dir), "config.yaml")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        values = [self._metric(_mlflow_name(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)

    def close(self) -> None:
        if rows := _samples(self._output_dir):
            table = dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
            self._client.log_table(self._id, table, "samples.json")
        self._client.set_terminated(self._id)


def _mlflow_name(metric: str) -> str:
    """Return the name of a metric without characters that MLflow rejects, such as the `@` of `eval/pass@4`."""
    return re.sub(r"[^\w\-./ ]", "_", metric.replace("@", "_at_"))


def _config(output_dir: Path) -> dict[str, Any]:
    """Return the resolved config of a run."""
    resolved = output_dir / "config.yaml"
    return yaml.safe_load(resolved.read_text(encoding="utf-8")) if resolved.is_file() else {}


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

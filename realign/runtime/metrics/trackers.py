"""Trackers of others behind the `Tracker` protocol: TensorBoard and Weights & Biases, each an extra."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import yaml

from realign.runtime.metrics.live_display import Tracker
from realign.settings import Settings


class TrackerSpec(Protocol):
    """What can open a tracker for a run, such as `TensorBoard`."""

    def open(self, name: str, output_dir: Path) -> Tracker:
        """Start a record called `name`, of the run in `output_dir`."""
        ...


@dataclass
class TensorBoard:
    """Event files that `tensorboard --logdir runs` shows (extra `tensorboard`)."""

    folder: str | None = None
    """Where they go; null: `tensorboard` in the run's folder."""

    def __post_init__(self) -> None:
        _extra("torch.utils.tensorboard", "tensorboard")

    def open(self, name: str, output_dir: Path) -> Tracker:
        """Open the event file."""
        folder = Path(self.folder, name) if self.folder is not None else output_dir / "tensorboard"
        return _EventFile(_extra("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder)))


class WandbMode(StrEnum):
    """Where Weights & Biases keeps a run."""

    online = "online"
    offline = "offline"


@dataclass
class WandB(Settings):
    """A run of Weights & Biases, with the resolved config (extra `wandb`). Its login is wandb's own."""

    project: str = "realign"
    """Name of the project."""
    group: str | None = None
    """Runs of one group stand together."""
    mode: WandbMode = WandbMode.online
    """online | offline (files that `wandb sync` uploads later)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _extra("wandb", "wandb")

    def open(self, name: str, output_dir: Path) -> Tracker:
        """Start the run."""
        resolved = output_dir / "config.yaml"
        config = yaml.safe_load(resolved.read_text(encoding="utf-8")) if resolved.is_file() else {}
        return _WandbRun(
            _extra("wandb", "wandb").init(
                project=self.project,
                group=self.group,
                name=name,
                dir=str(output_dir),
                mode=self.mode.value,
                config=config,
            )
        )


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


class _WandbRun:
    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def _extra(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"this tracker needs {extra}: pip install 'realign[{extra}]' ({error})") from error

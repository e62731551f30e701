"""Adapters of TensorBoard and Weights & Biases to the `Tracker` protocol; each needs an extra."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import yaml

from realign.errors import ConfigError
from realign.runtime.metrics.live_display import Tracker
from realign.settings import Settings


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
        raise ConfigError(f"The tracker needs {extra} ({error}). Run pip install 'realign-rl[{extra}]'.") from error

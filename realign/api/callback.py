"""`Callback`: the contract of hooks that read the metrics of a run, add metrics, or stop the run.

A run calls its callbacks in the order of the config, after a step and its evaluation, and before the metrics of the
step are logged. In distributed training only rank 0 calls them, and its results apply to all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from realign.settings import Settings


class EndStatus(StrEnum):
    """How a run ended."""

    completed = "completed"
    """All steps are done."""
    stopped = "stopped"
    """A callback stopped the run, or dynamic sampling found that the task is solved."""
    interrupted = "interrupted"
    """A signal such as Ctrl-C stopped the run."""
    failed = "failed"
    """An error ended the run."""


@dataclass(frozen=True)
class StartEvent:
    """The start of a run, before its first step."""

    name: str
    """Name of the run."""
    output_dir: Path
    """Folder of the run's files."""
    steps: int
    """Number of steps that the config asks for."""
    next_step: int
    """First step to execute: 1, or the step after the checkpoint of a resumed run."""
    resumed: bool
    """Whether the run continues from a checkpoint."""


@dataclass(frozen=True)
class StepEvent:
    """A finished step."""

    step: int
    """Number of the step, from 1."""
    steps: int
    """Number of steps that the config asks for."""
    metrics: Mapping[str, float]
    """All metrics of the step, with those of its evaluation (`eval/...`) if it had one. Read-only."""


@dataclass(frozen=True)
class EvaluationEvent:
    """A finished evaluation."""

    step: int
    """Step after which the evaluation ran; 0 before training."""
    steps: int
    """Number of steps that the config asks for."""
    metrics: Mapping[str, float]
    """Metrics of the evaluation, such as `eval/reward`. Read-only."""
    samples: Sequence[Mapping[str, Any]]
    """The first held-out prompts with response and reward, as in eval_samples.jsonl. Read-only."""


@dataclass(frozen=True)
class EndEvent:
    """The end of a run."""

    step: int
    """Last completed step."""
    steps: int
    """Number of steps that the config asks for."""
    status: EndStatus
    """How the run ended."""
    reason: str
    """Reason of a stop, or the message of an error; empty for a completed run."""


@dataclass(frozen=True)
class CallbackResult:
    """What a callback asks of the run."""

    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Metrics to add to the step: finite numbers under names that nothing else reports."""
    stop: str | None = None
    """Reason to stop the run after this step; None continues it."""


class Callback(Settings):
    """Base class of callbacks. Override only the methods that you need; a subclass with fields is a dataclass.

    An exception that a method raises ends the run and keeps its traceback.
    """

    def reads(self) -> Sequence[str]:
        """Return the metrics that the run must report. A missing one is an error at launch, as far as it is known."""
        return ()

    def on_start(self, event: StartEvent) -> None:
        """Handle the start of a run, after `load_state_dict` if the run is resumed."""

    def on_evaluation(self, event: EvaluationEvent) -> CallbackResult | None:
        """Handle a finished evaluation. It precedes `on_step` of the same step."""

    def on_step(self, event: StepEvent) -> CallbackResult | None:
        """Handle a finished step."""

    def on_end(self, event: EndEvent) -> None:
        """Handle the end of a run, also after an error. Models and checkpoint are saved already."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs: plain values and tensors. Checkpoints contain it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""

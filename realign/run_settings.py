"""The settings of a run: every key of an experiment, with its type, range, default and text, described once.

`realign.runtime.Experiment` narrows the types of the components to their classes. `realign.config.ExperimentConfig`
narrows them to the mappings of a config. Composing, help and completion read this module, so it does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from realign.settings import Count, NonNegativeInt, Positive, Range, Settings


@dataclass
class MicroBatchLimits(Settings):
    """Size of a forward pass. It does not change loss, gradient or metrics."""

    max_tokens_per_microbatch: Count | None = 16384
    """Maximum number of packed tokens in one forward pass; null sets no limit. A shared prefix that the pass computes
    once for all sequences of a prompt counts once."""
    n_microbatches: Count = 1
    """Minimum number of micro-batches, limited by the number of groups."""


@dataclass
class CheckpointSpec(Settings):
    """Schedule of the checkpoints, from which `resume` continues bit for bit.

    A checkpoint is also written at the end of the run, and when Ctrl-C or SIGTERM stops it.
    """

    every_steps: Count | None = None
    """Interval between checkpoints in steps; null sets no step interval."""
    every_minutes: Positive | None = 10.0
    """Interval between checkpoints in minutes of training; null sets no time interval. If both intervals are set, the
    first one to elapse triggers a checkpoint."""
    keep: Count = 2
    """Number of most recent checkpoints to keep. With `save_best`, the checkpoint of the best step is kept too."""

    def due(self, step: int, seconds: float) -> bool:
        """Return whether a checkpoint is due after this step, `seconds` after the last checkpoint."""
        by_step = self.every_steps is not None and step % self.every_steps == 0
        return by_step or (self.every_minutes is not None and seconds >= 60 * self.every_minutes)

    def describe(self) -> str:
        """Return a human-readable summary."""
        steps = [] if self.every_steps is None else [f"every {self.every_steps} steps"]
        minutes = [] if self.every_minutes is None else [f"every {self.every_minutes:g} minutes"]
        return f"{', '.join([*steps, *minutes, 'at the end'])}; keeps the last {self.keep}"


@dataclass
class RecordSpec(Settings):
    """Detail of the records for `realign report` and `realign view`: tokens, spans and the load of the machine."""

    every_steps: Count = 10
    """Interval in steps at which tokens and spans are recorded. The first step of the run is recorded too."""
    token_prompts: NonNegativeInt = 1
    """Number of prompts whose tokens are recorded in such a step; 0 records none."""
    token_responses: Count = 4
    """Maximum number of recorded responses of each of these prompts."""
    token_limit: Count = 1024
    """Maximum number of recorded tokens of a response, with the last 128 tokens of its prompt."""
    system_seconds: Positive | None = 10.0
    """Interval in seconds at which CPU, memory and GPU use are recorded; null records none."""
    calls: bool = True
    """Record what `realign replay` cannot compute again: rewards, episodes of environments and agents, the batches of
    asynchronous rollout, and samples of GPUs, servers and several processes. About 22 bytes per token."""

    def due(self, step: int) -> bool:
        """Return whether tokens and spans of this step are recorded."""
        return step == 1 or step % self.every_steps == 0


@dataclass(kw_only=True)
class RunSettings(Settings):
    """One step is one pass over the graph with `batch_prompts` prompts. Names of settings contain their unit."""

    name: str = "unnamed"
    """Name of the run in output, file names and trackers."""
    seed: int = 0
    """Seed from which all random numbers of the run are derived."""
    output_dir: str | Path = "runs"
    """Output folder for the resolved config, metrics, samples, curves, models and checkpoints."""
    overwrite: bool = False
    """Whether to replace an earlier run in `output_dir`."""
    checkpoint: CheckpointSpec | None = field(default_factory=CheckpointSpec)
    """Schedule of the checkpoints for resuming an interrupted run; null writes none."""
    resume: str | None = None
    """auto: resume from the newest valid checkpoint in `output_dir`, or start a new run if there is none. A path:
    resume from this checkpoint, or from the newest checkpoint of this run. null: start a new run."""
    resume_allow: list[str] = field(default_factory=list)
    """Config keys that may differ from the config of the checkpoint; a key includes all keys below it."""
    resume_skip: list[str] = field(default_factory=list)
    """Parts of the checkpoint to skip when resuming: optimizer, data, random, interfaces, callbacks, counters. Weights
    are always restored."""
    steps: Count
    """Number of training steps (passes over the graph)."""
    batch_prompts: Count
    """Number of prompts per step."""
    microbatch: MicroBatchLimits = field(default_factory=MicroBatchLimits)
    """Token budget of a forward pass, for all roles."""
    models: Mapping[str, Any]
    """Role -> component that loads its model, such as realign.engines.TransformersModel, the default in a config."""
    interfaces: Mapping[str, Any]
    """Role -> ModelInterface component that implements its algorithm."""
    graph: Any
    """Dataflow graph: the calls of a step. In a config, `_target_` is a function annotated `-> DataflowGraph`, and the
    other keys are its arguments; unset: the function `dataflow` beside the actor's class."""
    sync: Mapping[str, Any] = field(default_factory=dict)
    """Role that is not trained -> update of its weights from a trained role at the end of a step: of, weight,
    every_steps. In a config, `_target_` defaults to realign.api.Sync."""
    data: Any
    """Component that loads the training prompts."""
    shuffle: bool = True
    """Whether to shuffle the rows in each epoch. The order is a pure function of seed and epoch."""
    dynamic_sampling: Any = None
    """Dynamic sampling: sample until enough prompts have passed a filter on their rewards. In a config, `_target_`
    defaults to realign.runtime.DynamicSampling; empty or null disables it."""
    evaluation: Any = None
    """Evaluation on held-out rows before training, every n steps and after training. In a config, settings that the
    node lacks follow from the training settings, so evaluation.data.path=FILE is enough. Empty or null disables it."""
    evaluations: Mapping[str, Any] = field(default_factory=dict)
    """Name -> further evaluation, with metrics eval/NAME/..."""
    calibration: Any = None
    """Calibration of the gain and bias of a reward model, before or after training. In a config, `_target_` defaults to
    realign.runtime.RewardCalibration; empty or null disables it."""
    skip_together: bool = False
    """Whether an optimizer step that one model skips, because its loss or gradient is not finite, is skipped by all
    models that the graph trains (DeepSpeed-Chat: align_overflow). Their gradients are in memory at the same time."""
    save_every_steps: Count | None = None
    """Interval in steps at which the trained models are saved; null saves them only at the end."""
    keep_saves: Count | None = None
    """Number of most recent saves from `save_every_steps` to keep; null keeps all."""
    save_best: str | None = None
    """Metric, such as eval/reward, whose best value determines the models saved to `best`. Larger is better; a leading
    `-` (-eval/nll) means that smaller is better. null saves no best models."""
    sample_prompts: NonNegativeInt = 1
    """Number of prompts per step whose responses and rewards are written to samples.jsonl (`batch_prompts`: all)."""
    records: RecordSpec = field(default_factory=RecordSpec)
    """Detail of the records for the report: recorded tokens, spans and the load of the machine."""
    print_samples_every_steps: Count | None = None
    """Interval in steps at which three responses are printed, with reward and KL; null prints none."""
    trackers: Mapping[str, Any] = field(default_factory=dict)
    """Metric loggers besides metrics.jsonl: any name -> tracker, such as tensorboard or wandb."""
    callbacks: Mapping[str, Any] = field(default_factory=dict)
    """Hooks that read the metrics of the run, add metrics, or stop the run: any name -> component, such as
    early_stopping, or your own class in `_target_`. null disables one."""
    runtime: Any
    """Placement and execution of the models: config group `runtime` (local, ray). In a config, `_target_` defaults to
    realign.runtime.runtime_spec.Local."""
    rollout: Any
    """Synchronous or asynchronous rollout: config group `rollout` (sync, async). In a config, `_target_` defaults to
    realign.runtime.rollout.spec.Sync."""
    ratio_tolerance: Annotated[float, Range(ge=0)] | None = None
    """Largest |log-prob difference| between sampler and trainer, in nats, before the first update. A larger difference
    raises a warning, or an error with `strict_ratio`. null: 1e-3, or 0.1 for a model that computes in bfloat16."""
    strict_ratio: bool = False
    """Whether to stop the run, rather than warn, when the difference exceeds `ratio_tolerance`."""

"""`ExperimentConfig`: schema of an experiment's YAML file. Names of settings contain their unit.

A component is a mapping with `_target_`, the import path of a dataclass, and values of its fields. Defaults of a
component are defined only in its dataclass. Defaults of the run are defined here and in `realign.runtime.Experiment`,
because this module must not import torch. A test checks that both agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

COMPONENTS = (
    "models",
    "interfaces",
    "graph",
    "sync",
    "data",
    "dynamic_sampling",
    "evaluation",
    "evaluations",
    "calibration",
    "trackers",
    "callbacks",
    "runtime",
    "rollout",
)
"""Root keys that contain components. Hydra accepts any key in them; building checks the keys against the classes."""

REPORT = ("dropped", "owners", "typed")
"""Root keys that only `compose` sets."""


@dataclass
class MicroBatchConfig:
    """Size of a forward pass. It does not change loss, gradient or metrics."""

    max_tokens_per_microbatch: int | None = 16384
    """Maximum number of packed tokens in one forward pass; null sets no limit."""
    n_microbatches: int = 1
    """Minimum number of micro-batches, limited by the number of groups."""


@dataclass
class CheckpointConfig:
    """Schedule of the checkpoints for resuming. A run also writes one at its end and on Ctrl-C or SIGTERM."""

    every_steps: int | None = None
    """Interval between checkpoints in steps; null sets no step interval."""
    every_minutes: float | None = 10.0
    """Interval between checkpoints in minutes of training; null sets no time interval. If both intervals are set, the
    first one to elapse triggers a checkpoint."""
    keep: int = 2
    """Number of most recent checkpoints to keep."""


@dataclass
class RecordsConfig:
    """Detail of the records for `realign report` and `realign view`."""

    every_steps: int = 10
    """Interval in steps at which tokens and spans are recorded. The first step of the run is recorded too."""
    token_prompts: int = 1
    """Number of prompts whose tokens are recorded in such a step; 0 records none."""
    token_responses: int = 4
    """Maximum number of recorded responses of each of these prompts."""
    token_limit: int = 1024
    """Maximum number of recorded tokens of a response, with the last 128 tokens of its prompt."""
    system_seconds: float | None = 10.0
    """Interval in seconds at which CPU, memory and GPU use are recorded; null records none."""


@dataclass
class ExperimentConfig:
    """Root of the config. One step is one pass over the graph with `batch_prompts` prompts."""

    name: str = "unnamed"
    """Name of the run in output and file names."""
    seed: int = 0
    """Seed from which all random numbers of the run are derived."""
    output_dir: str = "runs/${name}"
    """Output folder for the resolved config, metrics, samples, models and checkpoints."""
    overwrite: bool = False
    """Whether to replace an earlier run in `output_dir`."""
    checkpoint: CheckpointConfig | None = field(default_factory=CheckpointConfig)
    """Schedule of the checkpoints for resuming an interrupted run; null writes none."""
    resume: str | None = None
    """auto: resume from the newest valid checkpoint in `output_dir`, or start a new run if there is none. A path:
    resume from this checkpoint, or from the newest checkpoint of this run. null: start a new run."""
    resume_allow: list[str] = field(default_factory=list)
    """Config keys that may differ from the config of the checkpoint."""
    resume_skip: list[str] = field(default_factory=list)
    """Parts of the checkpoint to skip when resuming: optimizer, data, random, interfaces, callbacks, counters."""
    steps: int = MISSING
    """Number of training steps (passes over the graph)."""
    batch_prompts: int = MISSING
    """Number of prompts per step."""
    microbatch: MicroBatchConfig = field(default_factory=MicroBatchConfig)
    """Token budget of a forward pass, for all roles."""
    models: dict[str, Any] = field(default_factory=dict)
    """Role -> component that loads its model; `_target_` defaults to realign.engines.TransformersModel."""
    interfaces: dict[str, Any] = field(default_factory=dict)
    """Role -> ModelInterface component that implements its algorithm."""
    graph: dict[str, Any] = field(default_factory=dict)
    """Dataflow graph: `_target_` is a function annotated `-> DataflowGraph`, and the other keys are its arguments."""
    sync: dict[str, Any] = field(default_factory=dict)
    """Role -> update of its weights from a trained role at the end of a step: of, weight, every_steps. `_target_`
    defaults to realign.api.Sync."""
    data: dict[str, Any] = field(default_factory=dict)
    """Component that loads the training prompts."""
    shuffle: bool = True
    """Whether to shuffle the rows in each epoch. The order is a pure function of seed and epoch."""
    dynamic_sampling: dict[str, Any] | None = field(default_factory=dict)
    """Dynamic sampling: sample until enough prompts have passed a filter. `_target_` defaults to
    realign.runtime.DynamicSampling; empty or null disables it."""
    evaluation: dict[str, Any] | None = field(default_factory=dict)
    """Periodic evaluation on held-out rows. Settings that the node lacks follow from the training settings, so
    evaluation.data.path=FILE is enough. Empty or null disables it."""
    evaluations: dict[str, Any] = field(default_factory=dict)
    """Name -> further evaluation, with metrics eval/NAME/..."""
    calibration: dict[str, Any] | None = field(default_factory=dict)
    """Calibration of the gain and bias of a reward model, before or after training. `_target_` defaults to
    realign.runtime.RewardCalibration; empty or null disables it."""
    save_every_steps: int | None = None
    """Interval in steps at which the trained models are saved; null saves them only at the end."""
    keep_saves: int | None = None
    """Number of most recent saves from `save_every_steps` to keep; null keeps all."""
    save_best: str | None = None
    """Metric, such as eval/reward, whose best value determines the models saved to `best`. Larger is better; a leading
    `-` (-eval/nll) means that smaller is better. null saves no best models."""
    sample_prompts: int = 1
    """Number of prompts per step whose responses and rewards are written to samples.jsonl (`batch_prompts`: all)."""
    records: RecordsConfig = field(default_factory=RecordsConfig)
    """Detail of the records for the report: recorded tokens, spans and the load of the machine."""
    print_samples_every_steps: int | None = None
    """Interval in steps at which three responses are printed, with reward and KL; null prints none."""
    trackers: dict[str, Any] = field(default_factory=dict)
    """Metric loggers besides metrics.jsonl: any name -> component, such as `_target_: realign.runtime.TensorBoard`."""
    callbacks: dict[str, Any] = field(default_factory=dict)
    """Hooks that read the metrics of the run, add metrics, or stop the run: any name -> component, such as
    early_stopping, or `_target_: my.module.MyCallback`. null disables one."""
    runtime: dict[str, Any] = field(default_factory=dict)
    """Placement and execution of the models: config group `runtime` (local, ray). `_target_` defaults to
    realign.runtime.runtime_spec.Local."""
    rollout: dict[str, Any] = field(default_factory=dict)
    """Synchronous or asynchronous rollout: config group `rollout` (sync, async). `_target_` defaults to
    realign.runtime.rollout.spec.Sync."""
    ratio_tolerance: float | None = None
    """Largest |log-prob difference| between sampler and trainer, in nats, before the first update. A larger difference
    raises a warning, or an error with `strict_ratio`. null: 1e-3, or 0.1 for a model that computes in bfloat16."""
    strict_ratio: bool = False
    """Whether to stop the run, rather than warn, when the difference exceeds `ratio_tolerance`."""
    threads: int | None = None
    """Number of CPU threads of torch; null keeps torch's default."""
    dropped: list[str] = field(default_factory=list)
    """Set by `compose`: discarded keys of lower layers, with their file."""
    owners: dict[str, str] = field(default_factory=dict)
    """Set by `compose`: config key -> the layer that owns it, such as algorithm=gspo."""
    typed: list[str] = field(default_factory=list)
    """Set by `compose`: keys of the command line."""

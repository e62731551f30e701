"""The settings of a run: every key of an experiment, with its type, range, default and text, described once.

A component is a mapping here, as in a config (`realign.config.ExperimentConfig`). `realign.runtime.Experiment` has the
objects instead. Composing, help and completion read this module, so it does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from realign.settings import Count, NonNegativeInt, Positive, Range, Settings

FREE = (
    "callbacks",
    "checkpoint",
    "keep_saves",
    "name",
    "output_dir",
    "overwrite",
    "print_samples_every_steps",
    "ratio_tolerance",
    "records",
    "resume",
    "resume_allow",
    "resume_skip",
    "runtime",
    "sample_prompts",
    "save_best",
    "save_every_steps",
    "steps",
    "strict_ratio",
    "threads",
    "trackers",
)
"""Config keys that do not affect training, with all keys below them; see `is_free`."""


def is_free(key: str) -> bool:
    """Return whether a config key does not affect training, and may differ between a checkpoint and the resumed run."""
    return key.partition(".")[0] in FREE or re.fullmatch(r"evaluation(s\.[^.]+)?\.every_steps", key) is not None


@dataclass
class MicroBatchLimits(Settings):
    """Size of a forward pass. It does not change loss, gradient or metrics."""

    max_tokens_per_microbatch: Count | None = 16384
    """Token budget of one forward pass: lower it if you run out of memory. null sets no limit. A prefix that the pass
    computes once for all sequences of a prompt counts once. Passes of larger models are shorter on a CPU, where a long
    one only needs memory."""
    n_microbatches: Count = 1
    """Split each batch into at least this many micro-batches (at most one per group)."""


@dataclass
class CheckpointSpec(Settings):
    """Schedule of the checkpoints, from which `resume` continues bit for bit.

    A checkpoint is also written at the end of the run, and when Ctrl-C or SIGTERM stops it.
    """

    every_steps: Count | None = None
    """Write a checkpoint every this many steps; null: not by steps."""
    every_minutes: Positive | None = 10.0
    """Write a checkpoint every this many minutes of training; null: not by time. With both intervals set, whichever
    elapses first counts."""
    keep: Count = 2
    """Keep this many of the latest checkpoints. `save_best` also keeps the one of the best step."""

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
    """Record tokens and spans every this many steps, and in the first step."""
    token_prompts: NonNegativeInt = 1
    """Number of prompts to record tokens for in such a step; 0 records none."""
    token_responses: Count = 4
    """Record at most this many responses per prompt."""
    token_limit: Count = 1024
    """Record at most this many tokens per response, plus the last 128 tokens of its prompt."""
    system_seconds: Positive | None = 10.0
    """Record CPU, memory and GPU use every this many seconds; null records none."""
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
    """Name of the run, shown in output, file names and trackers."""
    seed: int = 0
    """Seed for all random numbers of the run."""
    output_dir: str | Path = "runs"
    """Folder for everything the run writes: config, metrics, samples, curves, models and checkpoints."""
    overwrite: bool = False
    """Replace an earlier run in `output_dir`."""
    checkpoint: CheckpointSpec | None = field(default_factory=CheckpointSpec)
    """When to write the checkpoints that an interrupted run resumes from; null writes none."""
    resume: str | None = None
    """auto: continue from the newest valid checkpoint in `output_dir`, or start fresh if there is none. A path:
    continue from that checkpoint, or from the newest one of that run. null: start a new run."""
    resume_allow: list[str] = field(default_factory=list)
    """Keys that you changed on purpose since the checkpoint; a key includes all keys below it."""
    resume_skip: list[str] = field(default_factory=list)
    """Parts of the checkpoint to ignore: optimizer, data, random, interfaces, callbacks, counters. Weights are always
    restored."""
    steps: Count
    """Number of training steps (passes over the graph)."""
    batch_prompts: Count
    """Number of prompts per step, over all devices."""
    microbatch: MicroBatchLimits = field(default_factory=MicroBatchLimits)
    """Token budget of a forward pass, shared by all roles."""
    models: Mapping[str, Any] = field(default_factory=dict)
    """Role -> component that loads its model, such as realign.engines.TransformersModel, the default in a config."""
    interfaces: Mapping[str, Any] = field(default_factory=dict)
    """Role -> its algorithm: a ModelInterface component, such as grpo, ppo, sft or rule_reward."""
    graph: Any = field(default_factory=dict)
    """Dataflow graph: the calls of a step. In a config, `_target_` is a function annotated `-> DataflowGraph`, and the
    other keys are its arguments; unset: the function `dataflow` beside the actor's class."""
    sync: Mapping[str, Any] = field(default_factory=dict)
    """Role that isn't trained -> how it follows a trained role at the end of a step: of, weight, every_steps. In a
    config, `_target_` defaults to realign.api.Sync."""
    data: Any = field(default_factory=dict)
    """Training data: prompts, or the rows that the algorithm learns from."""
    shuffle: bool = True
    """Shuffle the rows in each epoch. The order depends only on seed and epoch."""
    curriculum: Any = field(default_factory=dict)
    """Curriculum: which prompts come how often, by their rolling pass rate (`pass_rate`) or a rule of your own. Any key
    below it turns it on; empty or null takes every prompt once per epoch."""
    cache_reference: bool = False
    """Let the frozen reference of DPO or KTO score the rows once before training, and free it. Its log-probs stay in
    the folder of the run, so resuming doesn't load it (TRL: precompute_ref_log_probs)."""
    dynamic_sampling: Any = field(default_factory=dict)
    """Dynamic sampling: keep sampling until enough prompts pass a filter on their rewards. In a config, `_target_`
    defaults to realign.runtime.DynamicSampling; empty or null disables it."""
    evaluation: Any = field(default_factory=dict)
    """Evaluation on held-out rows: before training, every n steps, and at the end. In a config,
    evaluation.data.path=FILE is enough, since everything else follows training. Empty or null disables it."""
    evaluations: Mapping[str, Any] = field(default_factory=dict)
    """More evaluations by name, with metrics eval/NAME/..."""
    calibration: Any = field(default_factory=dict)
    """Calibrate the gain and bias of a reward model, before or after training. In a config, `_target_` defaults to
    realign.runtime.RewardCalibration; empty or null disables it."""
    skip_together: bool = False
    """If one model skips an optimizer step, because its loss or gradient isn't finite, skip it for all models that the
    graph trains (DeepSpeed-Chat: align_overflow). Their gradients are then in memory at the same time."""
    save_every_steps: Count | None = None
    """Save the trained models every this many steps; null saves them only at the end."""
    keep_saves: Count | None = None
    """Keep this many of the latest saves from `save_every_steps`; null keeps all."""
    save_best: str | None = None
    """Save the models to `best` whenever this metric improves, such as eval/reward. If smaller is better, write a
    leading `-` (-eval/nll). null saves no best models."""
    sample_prompts: NonNegativeInt = 1
    """Write the responses and rewards of this many prompts per step to samples.jsonl (`batch_prompts`: all)."""
    records: RecordSpec = field(default_factory=RecordSpec)
    """How much detail the report gets: tokens, spans and the load of the machine."""
    print_samples_every_steps: Count | None = None
    """Print three responses with reward and KL every this many steps; null prints none."""
    trackers: Mapping[str, Any] = field(default_factory=dict)
    """Where else to log metrics, besides metrics.jsonl: any name -> tracker, such as tensorboard or wandb."""
    callbacks: Mapping[str, Any] = field(default_factory=dict)
    """Hooks that read metrics, add metrics, or stop the run: any name -> early_stopping, or your own class in
    `_target_`. null disables one."""
    runtime: Any = field(default_factory=dict)
    """Where the models run: config group `runtime` (local, ray). In a config, `_target_` defaults to
    realign.runtime.runtime_spec.Local."""
    rollout: Any = field(default_factory=dict)
    """Synchronous or asynchronous rollout: config group `rollout` (sync, async). In a config, `_target_` defaults to
    realign.runtime.rollout.spec.Sync."""
    ratio_tolerance: Annotated[float, Range(ge=0)] | None = None
    """How far log-probs of sampler and trainer may differ before the first update, in nats. A larger difference is a
    warning, or an error with `strict_ratio`. null: 1e-3, or 0.1 for a model that computes in bfloat16."""
    strict_ratio: bool = False
    """Stop the run, rather than warn, when the difference exceeds `ratio_tolerance`."""

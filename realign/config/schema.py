"""`ExperimentConfig`: what may stand in an experiment's YAML, with units in the names.

A component is a mapping with `_target_`, the import path of a dataclass, and fields of that dataclass. Its defaults
live in the dataclass and nowhere else; those of the run live here and in `realign.runtime.Experiment`, which a test
holds together (this module may not import torch).
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
    "calibration",
    "trackers",
    "runtime",
    "rollout",
)
"""Root keys that hold components: open to any key in Hydra, checked against the classes when they are built."""

REPORT = ("dropped", "owners")
"""Root keys that only the composition sets."""


@dataclass
class MicroBatchConfig:
    """How large a forward pass may be; invisible in loss, gradient and metrics."""

    max_tokens_per_microbatch: int | None = 16384
    """Packed tokens of one forward pass; null sets no limit."""
    n_microbatches: int = 1
    """At least this many, as far as there are groups to part."""


@dataclass
class CheckpointConfig:
    """When a run writes all that it needs to go on; one is written at the end and on Ctrl-C or SIGTERM in any case."""

    every_steps: int | None = None
    """Steps between two."""
    every_minutes: float | None = 10.0
    """Minutes of training between two; whichever of the two limits comes first."""
    keep: int = 2
    """How many stay, the latest ones."""


@dataclass
class ExperimentConfig:
    """The root. One step is one pass over the graph with `batch_prompts` prompts."""

    name: str = "unnamed"
    """For people and file names."""
    seed: int = 0
    """Root of every random choice of the run."""
    output_dir: str = "runs/${name}"
    """Gets the resolved config, metrics, samples and models."""
    overwrite: bool = False
    """Whether an earlier run in `output_dir` may be replaced."""
    checkpoint: CheckpointConfig | None = field(default_factory=CheckpointConfig)
    """When to write what the run needs to go on after whatever ends it; null: never."""
    resume: str | None = None
    """auto: go on from the newest good checkpoint in `output_dir`, or start if there is none; a path: from that
    checkpoint, or from the newest of that run; null: start."""
    resume_allow: list[str] = field(default_factory=list)
    """Keys of the config that may differ from the one that the checkpoint was written under."""
    resume_skip: list[str] = field(default_factory=list)
    """What not to take from the checkpoint: optimizer, data, random, interfaces, counters."""
    steps: int = MISSING
    """Passes over the graph."""
    batch_prompts: int = MISSING
    """Prompts per step."""
    microbatch: MicroBatchConfig = field(default_factory=MicroBatchConfig)
    """Token budget of a forward pass, for every role."""
    models: dict[str, Any] = field(default_factory=dict)
    """Role -> component that loads a model; `_target_` defaults to realign.engines.TransformersModel."""
    interfaces: dict[str, Any] = field(default_factory=dict)
    """Role -> component that is a ModelInterface: the algorithm."""
    graph: dict[str, Any] = field(default_factory=dict)
    """`_target_`: a function annotated `-> DataflowGraph`; the other keys are its keyword arguments."""
    sync: dict[str, Any] = field(default_factory=dict)
    """Role -> what it takes of a trained role's weights at the end of a step: of, weight, every_steps; `_target_`:
    realign.api.Sync."""
    data: dict[str, Any] = field(default_factory=dict)
    """Component that loads the training prompts."""
    shuffle: bool = True
    """Shuffle the rows anew in each epoch (a pure function of seed and epoch)."""
    dynamic_sampling: dict[str, Any] | None = field(default_factory=dict)
    """Sample until enough prompts have passed a filter; `_target_`: realign.runtime.DynamicSampling; empty: off."""
    evaluation: dict[str, Any] | None = field(default_factory=dict)
    """Held-out prompts, answered and judged now and then; `_target_`: realign.runtime.Evaluation, or LossEvaluation for
    the loss on held-out rows; empty: none."""
    calibration: dict[str, Any] | None = field(default_factory=dict)
    """Gain and bias of a reward model before or after training; `_target_`: realign.runtime.RewardCalibration; empty:
    none."""
    save_every_steps: int | None = None
    """Write the trained models every n steps; they are written at the end in any case."""
    keep_saves: int | None = None
    """How many of the folders that `save_every_steps` made stay, the latest ones; null keeps all."""
    save_best: str | None = None
    """Metric, such as eval/reward, at whose largest value so far the models are written to `best`; a `-` in front
    (-eval/nll) takes the smallest."""
    sample_prompts: int = 1
    """Prompts per step whose responses and rewards go to samples.jsonl (`batch_prompts`: those of all)."""
    print_samples_every_steps: int | None = None
    """Show three of a step's responses, with reward and KL, every n steps; null: never."""
    trackers: dict[str, Any] = field(default_factory=dict)
    """Where metrics go besides metrics.jsonl: any name -> component such as `_target_: realign.runtime.TensorBoard`."""
    runtime: dict[str, Any] = field(default_factory=dict)
    """Where models live and who calls them: config group `runtime` (local, ray); `_target_`:
    realign.runtime.runtime_spec.Local."""
    rollout: dict[str, Any] = field(default_factory=dict)
    """When responses are sampled: config group `rollout` (sync, async); `_target_`:
    realign.runtime.rollout.spec.Sync."""
    ratio_tolerance: float = 1e-3
    """Largest |log-prob difference| between sampler and trainer before the first update that passes silently (nats)."""
    strict_ratio: bool = False
    """Stop, rather than warn, when it is larger."""
    threads: int | None = None
    """CPU threads of torch; null leaves torch's own choice."""
    dropped: list[str] = field(default_factory=list)
    """Set by the composition: keys of lower layers that do not reach the run, with their file."""
    owners: dict[str, str] = field(default_factory=dict)
    """Set by the composition: place -> the layer that owns it, such as algorithm=gspo."""

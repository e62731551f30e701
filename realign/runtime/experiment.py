"""`Experiment`: the typed and validated settings of a run, built from a config or in a script; loads no model."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from realign.api import (
    RPC,
    Calibratable,
    DataflowGraph,
    MicroBatchSpec,
    ModelInterface,
    ModelSpec,
    Plan,
    Sync,
)
from realign.data import DataSpec
from realign.engines.files.folders import AVERAGED, check_name, check_run_folder
from realign.engines.shared_model import Share, SharedModel, check_shared
from realign.runtime.checkpoint.exports import CheckpointSpec
from realign.runtime.checks.contract import check_keys
from realign.runtime.default_roles import with_default_roles
from realign.runtime.evaluation.base import Evaluator
from realign.runtime.evaluation.calibration import RewardCalibration
from realign.runtime.metrics.trackers import TrackerSpec
from realign.runtime.rollout.dynamic_sampling import DynamicSampling
from realign.runtime.rollout.spec import RolloutSpec
from realign.runtime.rollout.spec import Sync as SyncRollout
from realign.runtime.runtime_spec import Local, RuntimeSpec
from realign.settings import Count, NonNegativeInt, Range, Settings

AUTO = "auto"
"""Value of `resume` that continues from the newest checkpoint in `output_dir`."""
CHECKPOINTS = "checkpoints"
"""Name of the checkpoint folder inside `output_dir`."""


class Part(StrEnum):
    """Parts of a checkpoint that a resumed run may skip (`resume_skip`); weights are always restored."""

    optimizer = "optimizer"
    """Optimizer moments, number of optimizer steps, and averaged weights, which restart as a copy of the weights."""
    data = "data"
    """The position in the dataset."""
    random = "random"
    """The states of the random number generators of Python, numpy and torch."""
    interfaces = "interfaces"
    """State of the algorithms: KL coefficient, running reward statistics, response pool."""
    counters = "counters"
    """Step, versions and records. Skipping them starts a new run at step 0, which needs a different `output_dir`."""


@dataclass
class Experiment(Settings):
    """All settings of a run. One step is one pass over the graph.

    Names contain the unit: prompts, sequences, tokens, steps.
    """

    name: str
    """Name of the run, used in output, file names and trackers."""
    steps: Count
    """Number of training steps; each step is one pass over the graph with one batch of prompts."""
    batch_prompts: Count
    """Prompts per step."""
    graph: DataflowGraph
    """RPCs of a step. Entries of `sync` are added to its weight syncs."""
    interfaces: Mapping[str, ModelInterface]
    """Algorithm interface of each role."""
    models: Mapping[str, ModelSpec]
    """Model spec of each role that has a model."""
    data: DataSpec
    """Training data."""
    output_dir: Path = Path("runs")
    """Output folder of metrics.jsonl, samples.jsonl, eval_samples.jsonl (held-out), curves.png and saved models."""
    seed: int = 0
    """Root seed of all random numbers of the run."""
    microbatch: MicroBatchSpec = field(default_factory=lambda: MicroBatchSpec(max_tokens_per_microbatch=16384))
    """Token budget of a forward pass, for every role."""
    shuffle: bool = True
    """Shuffle the rows in each epoch; the order depends only on seed and epoch."""
    sync: Mapping[str, Sync] = field(default_factory=dict)
    """Weight sync of roles that are not trained: which trained role to copy or average weights from after a step."""
    dynamic_sampling: DynamicSampling | None = None
    """Filter prompts by their rewards and sample until `batch_prompts` prompts have passed; null uses every batch
    unfiltered."""
    evaluation: Evaluator | None = None
    """Evaluation on held-out rows before training, every n steps and after training; null disables it."""
    calibration: RewardCalibration | None = None
    """Calibration of a reward model's gain and bias before or after training; null disables it."""
    save_every_steps: Count | None = None
    """Save the trained models every n steps. They are always saved at the end; null saves only then."""
    keep_saves: Count | None = None
    """Number of most recent `save_every_steps` folders to keep; null keeps all."""
    save_best: str | None = None
    """Metric, such as eval/reward, whose highest value so far triggers saving the models to `best`. The prefix `-`
    (-eval/nll) selects the lowest value; null disables it."""
    sample_prompts: NonNegativeInt = 1
    """Prompts per step whose responses and rewards are written to samples.jsonl; at `batch_prompts`, all of them."""
    print_samples_every_steps: Count | None = None
    """Print three responses of a step, with reward and KL, every n steps; null disables it."""
    trackers: Mapping[str, TrackerSpec] = field(default_factory=dict)
    """Metric trackers besides metrics.jsonl, under names of your choice, such as `realign.runtime.TensorBoard`."""
    runtime: RuntimeSpec = field(default_factory=Local)
    """Processes in which the models run: `Local` or `Ray`."""
    rollout: RolloutSpec = field(default_factory=SyncRollout)
    """When responses are sampled: synchronously within their training step, or asynchronously ahead of it."""
    ratio_tolerance: Annotated[float, Range(ge=0)] = 1e-3
    """Largest absolute log-prob difference (nats) between sampler and trainer before the first update. A larger one
    warns."""
    strict_ratio: bool = False
    """Raise an error instead of a warning when the difference exceeds `ratio_tolerance`."""
    overwrite: bool = False
    """Replace an earlier run in `output_dir`."""
    checkpoint: CheckpointSpec | None = field(default_factory=CheckpointSpec)
    """When to write checkpoints, from which an interrupted run can resume; null disables them."""
    resume: str | None = None
    """auto: continue from the newest valid checkpoint in `output_dir`, or start a new run if there is none. A path:
    continue from that checkpoint, or from the newest one of that run. null: start a new run."""
    resume_allow: list[str] = field(default_factory=list)
    """Config keys that may differ from the config stored in the checkpoint; a key includes all keys below it."""
    resume_skip: list[str] = field(default_factory=list)
    """Parts of the checkpoint to skip, by the names of `Part`; with all parts listed, only weights are restored."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.output_dir = Path(self.output_dir)
        self.dropped: list[str] = []
        """Config keys that a higher layer discarded, with their file."""
        self.resolved: Mapping[str, Any] = {}
        """The whole config as plain values; empty without one. Resuming compares it with the checkpoint's config."""
        self._check_resume()
        if self.keep_saves is not None and self.save_every_steps is None:
            raise ValueError(f"keep_saves={self.keep_saves} has no effect without save_every_steps")
        if self.save_best is not None and self.save_best.startswith(("eval/", "-eval/")) and self.evaluation is None:
            raise ValueError(f"save_best={self.save_best} is measured by an evaluation, and there is none")
        self._check_names()
        self.graph = dataclasses.replace(self.graph, sync={**self.graph.sync, **self.sync})
        roles = with_default_roles(self.graph, self.interfaces, self.models)
        self.interfaces, self.models = roles.interfaces, roles.models
        self.filled_roles: Mapping[str, str] = roles.filled
        """Description of each role that the config does not define and that was added with defaults."""
        self.graph.check_roles({role: type(i) for role, i in self.interfaces.items()}, self.models)
        if self.evaluation is not None:
            self.evaluation.check(self.graph, self.models)
        check_shared(self.models)
        self._check_sync()
        self._check_temperatures()
        self._check_calibration()
        self._check_dynamic_sampling()
        check_keys(self.graph, self.interfaces)
        for rpc in self.graph.rpcs:
            self._check_minibatches(rpc)
            self._check_sampler(rpc)

    def _check_resume(self) -> None:
        for part in self.resume_skip:
            if part not in list(Part):
                raise ValueError(f"resume_skip: unknown part {part!r} (valid: {', '.join(Part)})")
        for name, value in (("resume_allow", self.resume_allow), ("resume_skip", self.resume_skip)):
            if self.resume is None and value:
                raise ValueError(f"{name} has no effect without resume")
        if self.resume == AUTO and Part.counters in self.resume_skip:
            raise ValueError(
                "resume_skip=[counters] starts a new run: give its own output_dir, and resume=PATH of the old one"
            )

    def _check_names(self) -> None:
        """Check names that become files and folders."""
        check_name("name", self.name)
        for key, names in (("models", self.models), ("interfaces", self.interfaces), ("trackers", self.trackers)):
            for name in names:
                check_name(f"{key}:", name)
        for role in self.models:
            if role.removesuffix(AVERAGED) != role and role.removesuffix(AVERAGED) in self.models:
                raise ValueError(
                    f"models.{role} would be written where the averaged weights of {role.removesuffix(AVERAGED)!r} go; "
                    f"give it a name without {AVERAGED!r}"
                )

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles used by the run: those of the graph, the evaluated role, and the calibration policy."""
        others = [self.evaluation.role] if self.evaluation is not None else []
        others += [self.calibration.policy] if self.calibration is not None else []
        return tuple(dict.fromkeys([*(rpc.model for rpc in self.graph.rpcs), *others]))

    @property
    def prompts_at_once(self) -> int:
        """Prompts sampled together: `batch_prompts`, or `dynamic_sampling.generation_prompts` if set."""
        sampling = self.dynamic_sampling
        return self.batch_prompts if sampling is None else sampling.generation_prompts or self.batch_prompts

    @property
    def longest_response(self) -> int:
        """Longest response in tokens that a rollout of the graph can produce; 0 without sampling."""
        return self._longest.longest_response

    @property
    def length_setting(self) -> str:
        """Setting that determines `longest_response`, for messages."""
        return self._longest.length_setting

    @property
    def _longest(self) -> Plan:
        """Plan of the role that generates the longest responses."""
        plans = [self.interfaces[rpc.model].plan() for rpc in self.graph.rpcs if rpc.method == "generate"]
        return max(plans, key=lambda plan: plan.longest_response, default=Plan())

    @property
    def temperatures(self) -> dict[str, float]:
        """Temperature of each role of the graph that has one, by config key."""
        return {
            f"interfaces.{role}.{plan.temperature_setting}": plan.temperature
            for role, plan in self._plans.items()
            if plan.temperature is not None
        }

    @property
    def _plans(self) -> dict[str, Plan]:
        """Plan of each role of the graph."""
        return {role: self.interfaces[role].plan() for role in dict.fromkeys(rpc.model for rpc in self.graph.rpcs)}

    def _check_minibatches(self, rpc: RPC) -> None:
        """Check that mini-batches have equal sizes, so that every optimizer step has the same weight."""
        parts, prompts = self.interfaces[rpc.model].plan().n_minibatches, self.batch_prompts
        if rpc.method != "train_step" or parts < 2:
            return
        what = f"interfaces.{rpc.model}.n_minibatches={parts} mini-batches cannot be made of batch_prompts={prompts}"
        if parts > prompts:
            raise ValueError(
                f"{what}: each takes at least one prompt; set batch_prompts={parts} or more, or at most "
                f"n_minibatches={prompts}"
            )
        if prompts % parts:
            near = max(divisor for divisor in range(1, parts) if prompts % divisor == 0)
            multiples = f"batch_prompts={prompts - prompts % parts} or {prompts + -prompts % parts}"
            raise ValueError(f"{what} without a rest of {prompts % parts}; set {multiples}, or n_minibatches={near}")

    def _check_sampler(self, rpc: RPC) -> None:
        """Reject sampling settings that change the token distribution, because probability ratios would be wrong."""
        plan = self.interfaces[rpc.model].plan()
        if rpc.method != "generate" or plan.exact_sampling:
            return
        own = {theirs: ours for ours, theirs in rpc.rename.items()}
        for key in (key for key in rpc.outputs if own.get(key, key) == "logprobs"):
            for learner in self.graph.rpcs:
                if key in learner.inputs and learner.method in ("credit", "train_step"):
                    raise ValueError(
                        f"interfaces.{rpc.model} samples with {plan.sampler}, which changes the distribution, and the "
                        f"probability ratios of RPC {learner.name!r} would be wrong. Use neutral settings for training "
                        "(evaluation may use any)"
                    )

    def _check_temperatures(self) -> None:
        found = self.temperatures
        for key, value in found.items():
            first, expected = next(iter(found.items()))
            if value != expected:
                raise ValueError(
                    f"{first}={expected:g}, but {key}={value:g}: all roles of a graph must use one temperature, or "
                    "their log-probs cannot be compared"
                )

    def _check_sync(self) -> None:
        """Check that each synced role has separate weights, and that no call uses them while they change."""
        for role, sync in self.graph.sync.items():
            if isinstance(spec := self.models[role], SharedModel):
                raise ValueError(
                    f"sync.{role}: models.{role} shares the model of role {spec.of!r} and has no weights of its own; "
                    f"give it a model (models.{role}.path)"
                )
            for other, view in self.models.items():
                if isinstance(view, SharedModel) and view.of == role and view.branch is Share.reference:
                    raise ValueError(f"sync.{role}: models.{other} is its frozen start, which would move with it")
            if self.rollout.ahead and role in {r.model for r in self.graph.leading_to("rewards")}:
                raise ValueError(
                    f"sync.{role}: with rollout=async its calls are made ahead of the step, while the weights of "
                    f"{sync.of!r} change; leave the sync out, since rollout workers have their own, or set rollout=sync"
                )

    def _check_calibration(self) -> None:
        calibration = self.calibration
        if calibration is None:
            return
        if calibration.policy not in self.models:
            raise ValueError(
                f"calibration.policy {calibration.policy!r} has no model; roles with one: {', '.join(self.models)}"
            )
        calls = [rpc.method for rpc in self.graph.rpcs if rpc.model == calibration.role]
        if not calls or not isinstance(self.interfaces[calibration.role], Calibratable):
            raise ValueError(
                f"calibration.role {calibration.role!r} must be a role of the graph whose interface can be calibrated, "
                "such as RewardModelInterface"
            )
        if calibration.after and "train_step" not in calls:
            raise ValueError(
                f"calibration.after has no effect: nothing trains {calibration.role!r}, so nothing is saved of it; "
                "use calibration.before"
            )

    def _check_dynamic_sampling(self) -> None:
        sampling = self.dynamic_sampling
        if sampling is None:
            return
        leading = self.graph.leading_to("rewards")
        if not leading:
            raise ValueError("dynamic_sampling filters by key 'rewards', which no RPC of the graph writes")
        for rpc in leading:
            if rpc.method == "train_step":
                raise ValueError(
                    f"dynamic_sampling repeats the calls that lead to 'rewards', and RPC {rpc.name!r} trains"
                )
            n = self.interfaces[rpc.model].plan().responses_per_prompt if rpc.method == "generate" else None
            if n is not None and n < sampling.min_group_size:
                raise ValueError(
                    f"interfaces.{rpc.model}.generation.n={n} responses per prompt can never reach "
                    f"dynamic_sampling.min_group_size={sampling.min_group_size}"
                )

    def refuse_earlier_run(self) -> None:
        """Raise ValueError if `output_dir` contains a run that must not be overwritten, or is a link."""
        check_run_folder(self.output_dir)
        record = self.output_dir / "metrics.jsonl"
        if self.overwrite or not record.exists() or not record.stat().st_size:  # empty: it failed before its first line
            return
        found = f"output_dir {str(self.output_dir)!r} holds an earlier run"
        can_go_on = any((self.output_dir / CHECKPOINTS).glob("*step_*"))
        if self.resume is None:
            go_on = "go on with it by resume=auto, " if can_go_on else ""
            raise ValueError(f"{found}; {go_on}choose another one, or set overwrite=true")
        if self.resume == AUTO and not can_go_on and any(self._made_folders()):
            raise ValueError(
                f"{found} without a checkpoint to go on from, and resume=auto would replace its models; choose another "
                "one, or set overwrite=true"
            )
        if self.resume != AUTO and (Part.counters in self.resume_skip or not self.owns(Path(self.resume))):
            raise ValueError(f"{found}, and a run that starts from {self.resume!r} needs a folder of its own")

    def resume_folder(self) -> Path | None:
        """Return the folder that `resume` names; None if it names none.

        Raises:
            ValueError: the folder does not exist.
        """
        if self.resume is None or self.resume == AUTO:
            return None
        path = Path(self.resume).expanduser().resolve()
        if not path.is_dir():
            raise ValueError(f"resume={self.resume!r} is no folder; give auto, a checkpoint, or the folder of a run")
        return path

    def owns(self, path: Path) -> bool:
        """Return whether `path` is `output_dir`, its checkpoint folder, or a checkpoint in it."""
        own, path = self.output_dir.resolve(), path.expanduser().resolve()
        return path in (own, own / CHECKPOINTS) or path.parent == own / CHECKPOINTS

    def clear_earlier_run(self) -> None:
        """Remove the files of an earlier run from `output_dir`, so that they do not mix with this run's files."""
        for name in ("metrics.jsonl", "samples.jsonl", "eval_samples.jsonl", "curves.png", "last_failure.json"):
            (self.output_dir / name).unlink(missing_ok=True)
        for folder in (*self._made_folders(), self.output_dir / "tensorboard", self.output_dir / CHECKPOINTS):
            if folder.is_dir():
                shutil.rmtree(folder)

    def _made_folders(self) -> list[Path]:
        """Return the folders with saved models."""
        found = [self.output_dir / "final", self.output_dir / "best", *self.output_dir.glob("step_*")]
        return [folder for folder in found if folder.is_dir()]

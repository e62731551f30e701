"""`Experiment`: the typed and validated settings of a run, built from a config or in a script; loads no model."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from typing_extensions import override

from realign.api import (
    Callback,
    DataflowGraph,
    MicroBatchSpec,
    ModelInterface,
    ModelSpec,
    Plan,
    Role,
    RoleModel,
    Sync,
    Weights,
)
from realign.api.engine import role_of_hidden
from realign.data import DataSpec
from realign.data.curriculum import Curriculum
from realign.engines.shared_model import Share, SharedModel
from realign.errors import ConfigError, SettingsError
from realign.models.files.folders import AVERAGED, check_name
from realign.records.checkpoint.folder import CHECKPOINTS
from realign.records.metrics.trackers import TrackerSpec
from realign.run_settings import MicroBatchLimits, RunSettings
from realign.runtime.evaluation.base import Evaluator
from realign.runtime.evaluation.calibration import RewardCalibration
from realign.runtime.rollout.dynamic_sampling import DynamicSampling
from realign.runtime.rollout.spec import RolloutSpec
from realign.runtime.rollout.spec import Sync as SyncRollout
from realign.runtime.runtime_spec import Local, RuntimeSpec
from realign.runtime.steps_together import steps_together

AUTO = "auto"
"""Value of `resume` that continues from the newest checkpoint in `output_dir`."""


class CheckpointPart(StrEnum):
    """Parts of a checkpoint that a resumed run may skip (`resume_skip`); weights are always restored."""

    optimizer = "optimizer"
    """Optimizer moments, number of optimizer steps, and averaged weights, which restart as a copy of the weights."""
    data = "data"
    """The position in the dataset."""
    random = "random"
    """The states of the random number generators of Python, numpy and torch."""
    interfaces = "interfaces"
    """State of the algorithms: KL coefficient, running reward statistics, response pool."""
    callbacks = "callbacks"
    """State of the callbacks."""
    counters = "counters"
    """Step, versions and records. Skipping them starts a new run at step 0, which needs a different `output_dir`."""


@dataclass(kw_only=True)
class Experiment(RunSettings):
    """All settings of a run, with its components as objects. `RunSettings` describes each of them.

    Names contain the unit: prompts, sequences, tokens, steps.
    """

    output_dir: Path = Path("runs")
    microbatch: MicroBatchSpec = field(
        default_factory=lambda: MicroBatchSpec(MicroBatchLimits.max_tokens_per_microbatch)
    )
    graph: DataflowGraph
    interfaces: Mapping[str, ModelInterface]
    models: Mapping[str, ModelSpec]
    sync: Mapping[str, Sync] = field(default_factory=dict)
    """Entries are added to the weight syncs of `graph`."""
    data: DataSpec
    curriculum: Curriculum | None = None
    dynamic_sampling: DynamicSampling | None = None
    evaluation: Evaluator | None = None
    evaluations: Mapping[str, Evaluator] = field(default_factory=dict)
    calibration: RewardCalibration | None = None
    trackers: Mapping[str, TrackerSpec] = field(default_factory=dict)
    callbacks: Mapping[str, Callback] = field(default_factory=dict)
    runtime: RuntimeSpec = field(default_factory=Local)
    rollout: RolloutSpec = field(default_factory=SyncRollout)
    dropped: list[str] = field(default_factory=list, repr=False)
    """Config keys that a higher layer discarded, with their file."""
    idle: list[str] = field(default_factory=list, repr=False)
    """Settings of files that have no effect, with the reason."""
    resolved: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The whole config as plain values; empty without one. Resuming compares it with the checkpoint's config."""
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Source code of the functions of a Python session by config key, for run.json."""
    filled_roles: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Description of each role that the config does not define and that was added with defaults."""

    def __post_init__(self) -> None:
        """Check the fields one by one, and fill in what follows from others; `check_parts` compares them."""
        super().__post_init__()
        self.output_dir = Path(self.output_dir)
        self._check_resume()
        self._check_names()
        # What follows may happen again: `dataclasses.replace` then changes nothing but its arguments.
        self.graph = dataclasses.replace(self.graph, sync={**self.graph.sync, **self.sync})
        given = self.models
        self.interfaces, self.models, filled = with_default_roles(self.graph, self.interfaces, self.models)
        self.filled_roles = {**self.filled_roles, **filled}
        for role in (role for role in given if role not in self.roles):
            added = [other for other in self.models if other not in given]
            if near := difflib.get_close_matches(role, added, n=1, cutoff=0.5):  # `reference` for `ref`
                raise ConfigError(
                    f"models.{role}: nothing uses a model of this name, and {near[0]} is filled in by default "
                    f"({filled[near[0]]}). Set models.{near[0]} instead, or remove models.{role}."
                )
        self._share_tokenizer()

    @override
    def ineffective(self) -> dict[str, str]:
        reasons: dict[str, str] = {}
        if self.resume is None:
            reasons |= dict.fromkeys(("resume_allow", "resume_skip"), "without resume. Set resume")
        if self.save_every_steps is None:
            reasons["keep_saves"] = "without save_every_steps. Set save_every_steps"
        if all(len(calls) == 1 for calls in steps_together(self.graph.order)):
            reasons["skip_together"] = "without two models whose training calls follow each other in the graph"
        return reasons

    def _check_resume(self) -> None:
        for part in self.resume_skip:
            if part not in list(CheckpointPart):
                raise SettingsError(f"resume_skip=[{part}]: unknown part (valid: {', '.join(CheckpointPart)})")
        if self.resume == AUTO and CheckpointPart.counters in self.resume_skip:
            raise SettingsError(
                "resume_skip=[counters]: it starts a new run, which resume=auto cannot do. Set resume to the path of "
                "the earlier run, and choose another output_dir."
            )

    def _check_names(self) -> None:
        """Check names that become files and folders."""
        check_name("name", self.name)
        for key in ("models", "interfaces", "trackers", "callbacks", "evaluations"):
            for name in getattr(self, key):
                check_name(f"{key}:", name)
        for role in self.models:
            if role.removesuffix(AVERAGED) != role and role.removesuffix(AVERAGED) in self.models:
                raise ConfigError(
                    f"models.{role}: the averaged weights of models.{role.removesuffix(AVERAGED)} are saved under this "
                    f"name. Choose a role name that does not end in {AVERAGED!r}."
                )

    def _share_tokenizer(self) -> None:
        """Let all roles use the tokenizer of the leading role, except those whose spec names a tokenizer."""
        if not any(role in self.models for role in self.roles):
            return
        lead = self.lead_role
        if (source := self.models[lead].tokenizer_source(lead)) is not None:
            others = {role: spec.with_tokenizer(source) for role, spec in self.models.items() if role != lead}
            self.models = {role: others.get(role, spec) for role, spec in self.models.items()}

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles used by the run: those of the graph, the evaluated role, and the calibration policy."""
        others = [evaluation.role for evaluation in self.all_evaluations.values()]
        others += [self.calibration.policy] if self.calibration is not None else []
        return tuple(dict.fromkeys([*(rpc.model for rpc in self.graph.rpcs), *others]))

    @property
    def lead_role(self) -> str:
        """Role that tokenizes the data and has no metric prefix: "actor", or the first role with a model.

        Raises:
            ConfigError: no role has a model.
        """
        with_model = [role for role in self.roles if role in self.models]
        if not with_model:
            raise ConfigError("models: no role of the graph has a model. Set models.ROLE.path of the trained role.")
        return "actor" if "actor" in with_model else with_model[0]

    def owner_of(self, role: str) -> str:
        """Return the role that owns the weights of `role`: itself, or the role whose model it shares."""
        spec = self.models.get(role)
        return spec.of if isinstance(spec, SharedModel) else role

    @property
    def trained_roles(self) -> tuple[str, ...]:
        """Roles that an RPC of the graph trains."""
        return tuple(dict.fromkeys(rpc.model for rpc in self.graph.rpcs if rpc.method == "train_step"))

    @property
    def changing_roles(self) -> frozenset[str]:
        """Roles whose weights change: those that train, those of `sync`, and those that share the model of such a role.

        The start of a role, which a frozen branch keeps, doesn't change.
        """
        changing = {*self.trained_roles, *self.graph.sync}
        shared = {r for r, s in self.models.items() if isinstance(s, SharedModel) and s.branch is Share.whole}
        return frozenset(r for r in self.roles if r in changing or (r in shared and self.owner_of(r) in changing))

    @property
    def sampled_roles(self) -> tuple[str, ...]:
        """Trained roles that are called on the way to rewards; each needs a background sampler."""
        owners = dict.fromkeys(self.owner_of(rpc.model) for rpc in self.graph.leading_to("rewards"))
        return tuple(owner for owner in owners if owner in self.trained_roles)

    @property
    def cached_roles(self) -> tuple[str, ...]:
        """Roles whose log-probs of rows are cached; empty without `cache_reference`."""
        fixed = self.curriculum is None and self.dynamic_sampling is None
        fixed = fixed and not (self.data.streams or self.data.has_images)
        if not self.cache_reference or not fixed or self.rollout.ahead or self.runtime.starts_workers:
            return ()
        used = self.changing_roles | {self.owner_of(r) for r in self.models if self.owner_of(r) != r}
        used |= {evaluation.role for evaluation in self.all_evaluations.values()}
        return tuple(role for role in self.roles if role not in used and self._only_scores_rows(role))

    def _only_scores_rows(self, role: str) -> bool:
        """Return whether all calls of a role compute log-probs of the rows under frozen weights."""
        interface, spec = self.interfaces.get(role), self.models.get(role)
        if interface is None or spec is None or spec.facts().trainable or self.owner_of(role) != role:
            return False
        frozen = interface.plan().weights is Weights.frozen and interface.outputs() == {"logprobs"}
        rows = set(self.graph.dataset_keys)
        return frozen and all(
            rpc.method == "inference" and rows.issuperset(rpc.inputs) and not any(map(role_of_hidden, rpc.outputs))
            for rpc in self.graph.rpcs
            if rpc.model == role
        )

    @property
    def all_evaluations(self) -> dict[str, Evaluator]:
        """All evaluations by config key: `evaluation`, then `evaluations.<name>`."""
        unnamed = {} if self.evaluation is None else {"evaluation": self.evaluation}
        return unnamed | {f"evaluations.{name}": evaluation for name, evaluation in self.evaluations.items()}

    @property
    def prompts_at_once(self) -> int:
        """Prompts sampled together: `batch_prompts`, or `dynamic_sampling.generation_prompts` if set."""
        sampling = self.dynamic_sampling
        return self.batch_prompts if sampling is None else sampling.generation_prompts or self.batch_prompts

    @property
    def longest_response(self) -> int:
        """Longest response in tokens that a rollout of the graph can produce; 0 without sampling."""
        return self._longest[1].longest_response

    @property
    def length_setting(self) -> str:
        """Key that determines `longest_response`, for messages."""
        role, plan = self._longest
        return f"interfaces.{role}.{plan.length_setting}"

    @property
    def response_counts_prompt(self) -> bool:
        """Whether `longest_response` includes the prompt."""
        return self._longest[1].counts_prompt

    @property
    def _longest(self) -> tuple[str, Plan]:
        """The role that generates the longest responses, and its plan."""
        plans = [(rpc.model, self.interfaces[rpc.model].plan()) for rpc in self.graph.rpcs if rpc.method == "generate"]
        return max(plans, key=lambda role_plan: role_plan[1].longest_response, default=("actor", Plan()))

    @property
    def temperatures(self) -> dict[str, float]:
        """Temperature of each role of the graph that has one, by config key."""
        plans = {rpc.model: self.interfaces[rpc.model].plan() for rpc in self.graph.rpcs}
        return {
            f"interfaces.{role}.{plan.temperature_setting}": plan.temperature
            for role, plan in plans.items()
            if plan.temperature is not None
        }

    def resume_folder(self) -> Path | None:
        """Return the folder that `resume` names; None if it names none.

        Raises:
            ConfigError: the folder does not exist.
        """
        if self.resume is None or self.resume == AUTO:
            return None
        path = Path(self.resume).expanduser().resolve()
        if not path.is_dir():
            raise ConfigError(
                f"resume={self.resume!r}: this folder does not exist. Set auto, the path of a checkpoint, or the "
                "folder of a run."
            )
        return path

    def owns(self, path: Path) -> bool:
        """Return whether `path` is `output_dir`, its checkpoint folder, or a checkpoint in it."""
        own, path = self.output_dir.resolve(), path.expanduser().resolve()
        return path in (own, own / CHECKPOINTS) or path.parent == own / CHECKPOINTS


def with_default_roles(
    graph: DataflowGraph, interfaces: Mapping[str, ModelInterface], models: Mapping[str, ModelSpec]
) -> tuple[dict[str, ModelInterface], dict[str, ModelSpec], dict[str, str]]:
    """Return interfaces and models, with defaults for undefined roles that the graph uses, and what was added by role.

    Raises:
        ConfigError: two roles declare different defaults for a role that the config does not define.
    """
    defined, added = frozenset(interfaces), dict[str, str]()
    interfaces, models = dict(interfaces), dict(models)
    used = tuple(dict.fromkeys(rpc.model for rpc in graph.rpcs))
    asked: dict[str, tuple[str, Role]] = {}
    owners = [role for role in used if role in interfaces]
    for owner in owners:  # grows, since an added role may itself need further roles
        for role, default in interfaces[owner].roles().items():
            if role not in used:
                continue
            first, other = asked.setdefault(role, (owner, default))
            if role not in defined and other.interface != default.interface:
                raise ConfigError(
                    f"interfaces.{role}: interfaces.{first} and interfaces.{owner} declare different defaults for this "
                    f"role. Define interfaces.{role} in the config."
                )
            parts = []
            if role not in interfaces:
                owners.append(role)
                interfaces[role] = default.interface
                parts.append(type(default.interface).__name__)
            if role not in models and interfaces[role].needs_engine:
                spec = _default_model(default.model, owner, models)
                if spec is not None:
                    models[role] = spec
                    frozen = f"frozen copy of the start of {owner}"
                    parts.append(spec.describe() if isinstance(spec, SharedModel) else frozen)
            if parts:
                added[role] = ", ".join(parts)
    return interfaces, models, added


def _default_model(kind: RoleModel, owner: str, models: Mapping[str, ModelSpec]) -> ModelSpec | None:
    """Return the spec of a role's default model; None if the role or its owner has no model."""
    spec = models.get(owner)
    # an owner that shares a model itself: share with the role that has the weights, since a view cannot be shared
    if isinstance(spec, SharedModel):
        owner, spec = spec.of, models.get(spec.of)
    if spec is None or kind is RoleModel.none:
        return None
    return SharedModel(owner) if kind is RoleModel.shared else spec.frozen_start(owner)

"""What is looked at before anything is loaded, at launch and in `realign check`: roles, files, the folder of the run.

`Experiment` compares values with each other. Here they are compared with what is on the disk, and roles with the models
that play them, as far as the config tells. What needs the tokenizer (lengths of rows) or the weights (does a family run
packed) comes with them, still before the first rollout.
"""

from __future__ import annotations

import difflib
import tempfile
import warnings
from pathlib import Path
from typing import Any

from realign.api import RPC, ModelInterface
from realign.engines import TransformersModel
from realign.engines.optim import Schedule, ScheduleKind, ScheduleUnit
from realign.engines.ranks import current
from realign.engines.shared import Share, SharedModel
from realign.interfaces.environment import EnvironmentInterface
from realign.interfaces.greedy import GreedyInterface
from realign.interfaces.ppo import PPOActorInterface
from realign.interfaces.reference import ReferenceInterface
from realign.runtime.ahead import owner_of, sampled_roles
from realign.runtime.backend import check_runtime
from realign.runtime.experiment import Experiment, ModelSpec
from realign.runtime.models import check_optimizers, check_outputs
from realign.runtime.rollout import Async

OF_REWARDS = ("reward", "reward_ema", "missing_rewards")


def check_ready(experiment: Experiment) -> None:
    """Find what would end the run later.

    Raises:
        ValueError: names the key, what was found and what is valid.
        OSError: `output_dir` cannot be written.
    """
    check_runtime(experiment)
    check_optimizers(experiment)
    for rpc in experiment.graph.rpcs:
        _check_model(rpc, experiment)
        _check_sharing(rpc, experiment)
        _check_conversation(rpc, experiment)
        _check_schedule(rpc, experiment)
    _check_rollout(experiment)
    _check_budget(experiment)
    _check_save_best(experiment)
    experiment.resume_folder()
    writable(experiment.output_dir)
    for role in experiment.roles:
        spec: Any = experiment.models.get(role)
        if hasattr(spec, "check"):
            spec.check(role)
    nodes = {"data": experiment, "evaluation.data": experiment.evaluation, "calibration.data": experiment.calibration}
    for where, owner in nodes.items():
        if owner is not None and hasattr(owner.data, "check"):
            owner.data.check(where)


def used_interfaces(experiment: Experiment) -> dict[str, ModelInterface]:
    """The interfaces that take part, by their config keys: those of the graph, and those that only evaluate."""
    used = {f"interfaces.{rpc.model}": experiment.interfaces[rpc.model] for rpc in experiment.graph.rpcs}
    judges = experiment.evaluation.judges if experiment.evaluation is not None else {}
    return used | {f"evaluation.{key}": judge for key, judge in judges.items()}


def open_interfaces(experiment: Experiment) -> None:
    """Let the interfaces acquire what they need, such as a reward function.

    Of several processes rank 0 alone opens those without a model, since it alone makes their calls.

    Raises:
        ValueError: names the key.
    """
    ranks = current()
    for where, interface in used_interfaces(experiment).items():
        try:
            if interface.needs_engine:
                interface.open()
            else:
                ranks.lead(interface.open)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error


def writable(output_dir: Path) -> Path:
    """The nearest folder of `output_dir` that exists.

    Raises:
        OSError: names `output_dir`; files cannot be made there.
    """
    folder = next(path for path in (output_dir.absolute(), *output_dir.absolute().parents) if path.exists())
    choose = "choose another output_dir"
    if not folder.is_dir():
        raise NotADirectoryError(f"output_dir {str(output_dir)!r}: {str(folder)!r} is not a folder; {choose}")
    try:
        with tempfile.TemporaryFile(dir=folder):  # of a name of its own, since several runs may look at once
            pass
    except OSError as error:
        why = f"output_dir {str(output_dir)!r}: cannot write to {str(folder)!r} ({error.strerror}); {choose}"
        raise type(error)(why) from error
    return folder


def _check_model(rpc: RPC, experiment: Experiment) -> None:
    """Compare what an interface asks of its model with the head that the config gives it."""
    spec = experiment.models.get(rpc.model)
    owner, key = spec, rpc.model
    if isinstance(spec, SharedModel):
        if spec.of not in experiment.roles:
            raise ValueError(
                f"models.{rpc.model} shares the model of role {spec.of!r}, which takes no part in the graph; roles "
                f"that do: {', '.join(experiment.roles)}"
            )
        owner, key = experiment.models[spec.of], spec.of
        if spec.branch is Share.reference:
            _check_branch(rpc.model, spec.of, owner)
    outputs = getattr(owner, "outputs", None)
    if isinstance(spec, SharedModel) and spec.branch is Share.reference:
        outputs = frozenset({"logprobs"})
    if outputs is not None:
        check_outputs(rpc.model, outputs, experiment.interfaces[rpc.model], key)


def _check_branch(role: str, of: str, owner: ModelSpec) -> None:
    """A frozen start inside a model needs a part of it that does not move."""
    if isinstance(owner, TransformersModel) and not owner.keeps_start:
        raise ValueError(
            f"models.{role}.branch=reference: models.{of} trains all of its weights, so that no branch of it stays as "
            f"it is; set models.{of}.trains=top_layers or lora, or give {role} a model of its own (models.{role}.path)"
        )


def _check_sharing(rpc: RPC, experiment: Experiment) -> None:
    """Roles that must see the weights in training share them; a reference must not."""
    trained = {other.model for other in experiment.graph.rpcs if other.method == "train_step"}
    spec, interface = experiment.models.get(rpc.model), experiment.interfaces[rpc.model]
    if isinstance(spec, SharedModel):
        if isinstance(interface, ReferenceInterface) and spec.branch is Share.whole and spec.of in trained:
            raise ValueError(
                f"models.{rpc.model}.branch=whole: the reference would move with models.{spec.of}, which is trained, "
                f"and every KL would be 0; set models.{rpc.model}.branch=reference, or give it a model of its own"
            )
        return
    path = getattr(spec, "path", None)
    if rpc.model in trained or path is None:
        return
    share = f"share its weights: ~models.{rpc.model} '+models.{rpc.model}={{_target_: realign.engines.SharedModel, of: "
    if isinstance(interface, GreedyInterface):
        sampler = next((r.model for r in experiment.graph.rpcs if r.method == "generate" and r.model in trained), None)
        if sampler is not None:
            raise ValueError(
                f"models.{rpc.model}.path={path!r} is a copy that stays as it is, but its greedy answers are "
                f"compared with samples of models.{sampler}, which is trained; {share}{sampler}}}'"
            )
    if "logprobs" in rpc.outputs and rpc.method == "generate" and rpc.model not in experiment.graph.sync:
        learner = next((r.model for r in experiment.graph.rpcs if r.model in trained and "logprobs" in r.inputs), None)
        if learner is not None:
            raise ValueError(
                f"models.{rpc.model}.path={path!r} is a copy that stays as it is, but models.{learner} is trained on "
                f"what it samples; {share}{learner}}}', or move the weights by sync.{rpc.model}.of={learner}"
            )
    if "values" in rpc.outputs:
        learner = next((r.model for r in experiment.graph.rpcs if r.model in trained and "values" in r.inputs), None)
        if learner is not None and getattr(experiment.interfaces[learner], "value", None) is not None:
            raise ValueError(
                f"models.{rpc.model}.path={path!r} is a model that nothing trains: with graph.critic=shared the "
                f"loss of models.{learner} trains the values of its own value_head; {share}{learner}}}'"
            )


def _check_conversation(rpc: RPC, experiment: Experiment) -> None:
    """Compare what a role that converses samples with what is said of it to those that learn from it."""
    interface = experiment.interfaces[rpc.model]
    if not isinstance(interface, EnvironmentInterface):
        return
    for role in dict.fromkeys(r.model for r in experiment.graph.rpcs if r.method == "train_step"):
        learner = experiment.interfaces[role]
        if not isinstance(learner, PPOActorInterface):
            continue
        if learner.generation.n != interface.generation.n:
            raise ValueError(
                f"interfaces.{rpc.model}.generation.n={interface.generation.n} episodes per prompt, but "
                f"interfaces.{role}.generation.n={learner.generation.n}: set both to one number, such as by "
                f"interfaces.{rpc.model}.generation=${{interfaces.{role}.generation}}"
            )
        limit = learner.generation.max_new_tokens
        if learner.truncation.overlong_buffer and limit < interface.max_episode_tokens:
            raise ValueError(
                f"interfaces.{role}.truncation.overlong_buffer counts the tokens of a whole episode, up to "
                f"interfaces.{rpc.model}.max_episode_tokens={interface.max_episode_tokens}, but "
                f"interfaces.{role}.generation.max_new_tokens={limit} would be its limit: set that to the former, and "
                f"interfaces.{rpc.model}.generation.max_new_tokens to the tokens of a turn"
            )


def _check_schedule(rpc: RPC, experiment: Experiment) -> None:
    """Warn of a learning rate that reaches 0 before the run ends: what is made from then on changes nothing."""
    spec: Any = experiment.models.get(rpc.model)
    schedule = getattr(getattr(spec, "optimizer", None), "schedule", None)
    if rpc.method != "train_step" or not isinstance(schedule, Schedule):
        return
    interface = experiment.interfaces[rpc.model]
    steps = experiment.steps - getattr(interface, "critic_warmup_steps", 0)
    if schedule.unit is ScheduleUnit.optimizer_step:
        steps *= getattr(interface, "epochs", 1) * getattr(interface, "n_minibatches", 1)
    if schedule.kind is not ScheduleKind.constant and not schedule.min_ratio and (schedule.total or steps) < steps:
        warnings.warn(
            f"models.{rpc.model}.optimizer.schedule.total={schedule.total}, but the run makes up to {steps} "
            f"{schedule.unit.value}s: after the first {schedule.total} the learning rate is 0; set total={steps}, or "
            "min_ratio above 0",
            stacklevel=2,
        )


def _check_rollout(experiment: Experiment) -> None:
    """Find what cannot be sampled ahead of training, and warn of an objective that does not make up for it."""
    rollout = experiment.rollout
    if not isinstance(rollout, Async):
        return
    if current().size > 1:
        raise ValueError("rollout=async runs in one process, or on Ray (runtime=ray); under torchrun use rollout=sync")
    leading = experiment.graph.leading_to("rewards")
    samplers = {owner_of(experiment, rpc.model) for rpc in leading if rpc.method == "generate"}
    if not samplers:
        raise ValueError(
            "rollout=async makes the calls that lead to key 'rewards' ahead of training, and none of them generates; "
            "use rollout=sync"
        )
    trained = sampled_roles(experiment)
    for rpc in leading:
        spec = experiment.models.get(rpc.model)
        frozen_start = isinstance(spec, SharedModel) and spec.branch is Share.reference
        owner = owner_of(experiment, rpc.model)
        if rpc.method == "train_step" or frozen_start or (owner in trained and owner not in samplers):
            what = "trains" if rpc.method == "train_step" else f"uses models.{rpc.model}, which changes meanwhile"
            raise ValueError(
                f"rollout=async makes the calls that lead to 'rewards' ahead of training, but RPC {rpc.name!r} {what}; "
                "use rollout=sync"
            )
    if rollout.max_staleness:
        for rpc in experiment.graph.rpcs:
            if rpc.method == "train_step" and rpc.model in trained:
                _warn_of_stale_ratios(rpc, experiment, rollout)


def _warn_of_stale_ratios(rpc: RPC, experiment: Experiment, rollout: Async) -> None:
    interface = experiment.interfaces[rpc.model]
    if "logprobs" not in rpc.inputs or "prox_logprobs" in interface.required_inputs("train_step"):
        return
    how = "clips around the policy that sampled them, which is not the one before the update"
    if "prox_logprobs" in rpc.inputs:
        how = "does not weigh them by how likely they are under the policy before the update (graph.recompute)"
    module = "realign.interfaces.decoupled_ppo"
    warnings.warn(
        f"rollout.max_staleness={rollout.max_staleness}: responses may be so many versions old, and "
        f"interfaces.{rpc.model} ({type(interface).__name__}) {how}. Decoupled PPO is made for them: "
        f"graph._target_={module}.dataflow interfaces.{rpc.model}._target_={module}.DecoupledPPOActorInterface "
        "(docs/guides/async.md)",
        stacklevel=2,
    )


def _check_budget(experiment: Experiment) -> None:
    limit, response = experiment.microbatch.max_tokens_per_microbatch, experiment.longest_response
    setting = experiment.length_setting
    if limit is not None and limit <= response:
        raise ValueError(
            f"microbatch.max_tokens_per_microbatch={limit} cannot hold one sequence: a response may have "
            f"{setting.rpartition('.')[2]}={response} tokens, and its prompt comes before it; raise the budget above "
            f"{response}, or lower {setting}"
        )


def _check_save_best(experiment: Experiment) -> None:
    """Refuse a metric that cannot come; one that only the first step can tell of is looked for then."""
    if experiment.save_best is None:
        return
    metric = experiment.save_best.removeprefix("-")
    if metric in OF_REWARDS and "rewards" not in experiment.graph.producers:
        raise ValueError(
            f"save_best={experiment.save_best}: no call of the graph writes rewards, so that nothing measures it; name "
            "another metric, such as -loss (the smallest)"
        )
    known = experiment.evaluation.metric_names() if experiment.evaluation is not None else None
    if known is not None and metric.startswith("eval/") and metric not in known:
        near = difflib.get_close_matches(metric, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"save_best={experiment.save_best}: the evaluation does not measure {metric!r}{hint} (valid: "
            f"{', '.join(sorted(known))})"
        )

"""Checks before loading, at launch and in `realign check`: roles, files and the output folder.

`Experiment` compares settings with each other. This module compares them with the files on disk, and roles with their
models, as far as the config describes them. Checks that need the tokenizer (row lengths) or the weights (support for
packed sequences) follow during loading, before the first rollout.
"""

from __future__ import annotations

import difflib
import tempfile
import warnings
from collections.abc import Collection
from pathlib import Path

from realign.api import RPC, ModelInterface, ModelSpec, Plan, Weights
from realign.api.sample import TOKENS
from realign.engines.distributed.ranks import current
from realign.engines.shared_model import Share, SharedModel
from realign.engines.training.optimizer import ScheduleUnit
from realign.runtime.experiment import Experiment
from realign.runtime.models import check_optimizers, check_outputs
from realign.runtime.processes.placement import check_runtime
from realign.runtime.rollout.asynchronous import owner_of, sampled_roles
from realign.runtime.rollout.spec import Async

OF_REWARDS = ("reward", "reward_ema", "missing_rewards")


def check_ready(experiment: Experiment) -> None:
    """Find configuration errors that would otherwise stop the run later.

    Raises:
        ValueError: the message contains the key, its value and the valid values.
        OSError: `output_dir` is not writable.
    """
    check_runtime(experiment)
    check_optimizers(experiment)
    for rpc in experiment.graph.rpcs:
        _check_model(rpc, experiment)
        _check_sharing(rpc, experiment)
        _check_schedule(rpc, experiment)
    _check_responses(experiment)
    _check_rollout(experiment)
    _check_budget(experiment)
    _check_save_best(experiment)
    experiment.resume_folder()
    writable(experiment.output_dir)
    for role in experiment.roles:
        if role in experiment.models:
            experiment.models[role].check(role)
    nodes = {"data": experiment, "evaluation.data": experiment.evaluation, "calibration.data": experiment.calibration}
    for where, owner in nodes.items():
        if owner is not None:
            owner.data.check(where)


def used_interfaces(experiment: Experiment) -> dict[str, ModelInterface]:
    """Return the interfaces that the run uses, by config key: those of the graph, and those of the evaluation."""
    used = {f"interfaces.{rpc.model}": experiment.interfaces[rpc.model] for rpc in experiment.graph.rpcs}
    judges = experiment.evaluation.judges if experiment.evaluation is not None else {}
    return used | {f"evaluation.{key}": judge for key, judge in judges.items()}


def open_interfaces(experiment: Experiment) -> None:
    """Open the interfaces, which acquire resources such as a reward function.

    With several ranks, only rank 0 opens interfaces without a model, because only rank 0 calls them.

    Raises:
        ValueError: the message contains the config key.
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
    """Return the nearest existing folder of `output_dir`.

    Raises:
        OSError: files cannot be created there; the message contains `output_dir`.
    """
    folder = next(path for path in (output_dir.absolute(), *output_dir.absolute().parents) if path.exists())
    choose = "choose another output_dir"
    if not folder.is_dir():
        raise NotADirectoryError(f"output_dir {str(output_dir)!r}: {str(folder)!r} is not a folder; {choose}")
    try:
        with tempfile.TemporaryFile(dir=folder):  # a unique name, since several runs may check at once
            pass
    except OSError as error:
        why = f"output_dir {str(output_dir)!r}: cannot write to {str(folder)!r} ({error.strerror}); {choose}"
        raise type(error)(why) from error
    return folder


def _check_model(rpc: RPC, experiment: Experiment) -> None:
    """Check that the head in the config produces the outputs that the interface needs."""
    spec = experiment.models.get(rpc.model)
    if spec is None:
        return
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
    outputs = spec.facts().outputs or owner.facts().outputs
    if outputs is not None:
        check_outputs(rpc.model, outputs, experiment.interfaces[rpc.model], key)


def _check_branch(role: str, of: str, owner: ModelSpec) -> None:
    """Check that a reference branch inside a model has weights that are not trained."""
    facts = owner.facts()
    if facts.trainable and facts.branches is False:
        raise ValueError(
            f"models.{role}.branch=reference: models.{of} trains all of its weights, so that no branch of it stays as "
            f"it is; set models.{of}.trains=top_layers or lora, or give {role} a model of its own (models.{role}.path)"
        )


def _check_sharing(rpc: RPC, experiment: Experiment) -> None:
    """Check a role's weights against the requirements of its interface and of the roles that train on its outputs."""
    trained = {other.model for other in experiment.graph.rpcs if other.method == "train_step"}
    spec, plan = experiment.models.get(rpc.model), experiment.interfaces[rpc.model].plan()
    if isinstance(spec, SharedModel):
        if plan.weights is Weights.frozen and spec.branch is Share.whole and spec.of in trained:
            raise ValueError(
                f"models.{rpc.model}.branch=whole: {rpc.model} needs frozen weights, but would change with "
                f"models.{spec.of}, which is trained. Set models.{rpc.model}.branch=reference, or give {rpc.model} a "
                "model of its own"
            )
        return
    path = None if spec is None else spec.facts().path
    if path is None or rpc.model in trained or rpc.model in experiment.graph.sync:
        return
    share = f"share its weights: ~models.{rpc.model} '+models.{rpc.model}={{_target_: realign.engines.SharedModel, of: "
    sampler = next((r.model for r in experiment.graph.rpcs if r.method == "generate" and r.model in trained), None)
    reader = _trained_reader(rpc, "logprobs", trained, experiment) if rpc.method == "generate" else None
    learner = reader or (sampler if plan.weights is Weights.live else None)
    if learner is not None:
        raise ValueError(
            f"models.{rpc.model}.path={path!r} is a copy that nothing updates, but {rpc.model} must sample with the "
            f"weights of models.{learner}, which is trained; {share}{learner}}}', or update it by "
            f"sync.{rpc.model}.of={learner}"
        )
    learner = _trained_reader(rpc, "values", trained, experiment)
    if learner is not None and "values" in experiment.interfaces[learner].outputs():
        raise ValueError(
            f"models.{rpc.model}.path={path!r} is a model that nothing trains, but the loss of models.{learner} trains "
            f"the values of its own value_head; {share}{learner}}}'"
        )


def _trained_reader(rpc: RPC, key: str, trained: Collection[str], experiment: Experiment) -> str | None:
    """Return the trained role that reads a key which `rpc` writes; None if there is none."""
    if key not in rpc.outputs:
        return None
    return next((r.model for r in experiment.graph.rpcs if r.model in trained and key in r.inputs), None)


def _check_responses(experiment: Experiment) -> None:
    """Check that a role generates the responses that the roles trained on them expect."""
    for rpc in experiment.graph.rpcs:
        if rpc.method != "generate":
            continue
        made = experiment.interfaces[rpc.model].plan()
        tokens = {key for key in rpc.outputs if key == rpc.rename.get(TOKENS, TOKENS)}
        for learner in experiment.graph.rpcs:
            if learner.method != "train_step" or learner.model == rpc.model or not tokens & set(learner.inputs):
                continue
            _check_plans(rpc.model, made, learner.model, experiment.interfaces[learner.model].plan())


def _check_plans(sampler: str, made: Plan, learner: str, expected: Plan) -> None:
    n, want = made.responses_per_prompt, expected.responses_per_prompt
    if n is not None and want is not None and n != want:
        raise ValueError(
            f"interfaces.{sampler}.generation.n={n} responses, but interfaces.{learner}.generation.n={want}. "
            f"Set both to one number, such as by interfaces.{sampler}.generation=${{interfaces.{learner}.generation}}"
        )
    limit = expected.expected_response
    if limit is not None and limit < made.longest_response:
        raise ValueError(
            f"interfaces.{learner}: its settings are relative to responses of {limit} tokens "
            f"(interfaces.{learner}.{expected.length_setting}), but {sampler} generates up to {made.longest_response} "
            f"(interfaces.{sampler}.{made.length_setting}). Set interfaces.{learner}.{expected.length_setting}="
            f"{made.longest_response}"
        )


def _check_schedule(rpc: RPC, experiment: Experiment) -> None:
    """Warn about a learning rate that reaches 0 before the run ends; later steps would not change the weights."""
    spec = experiment.models.get(rpc.model)
    facts = None if spec is None else spec.facts()
    if rpc.method != "train_step" or facts is None or facts.rate_ends is None:
        return
    plan = experiment.interfaces[rpc.model].plan()
    steps = experiment.steps - (plan.first_training_step - 1)
    if facts.rate_unit == ScheduleUnit.optimizer_step:
        steps *= plan.optimizer_steps
    if facts.rate_ends < steps:
        warnings.warn(
            f"models.{rpc.model}.optimizer.schedule.total={facts.rate_ends}, but the run takes up to {steps} "
            f"{facts.rate_unit}s: after the first {facts.rate_ends} the learning rate is 0; set total={steps}, or "
            "min_ratio above 0",
            stacklevel=2,
        )


def _check_rollout(experiment: Experiment) -> None:
    """Reject calls that cannot run asynchronously, and warn about objectives that do not correct for staleness."""
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
    if "logprobs" not in rpc.inputs or interface.plan().corrects_staleness:
        return
    how = "clips around the policy that sampled them, which is not the one before the update"
    if "prox_logprobs" in rpc.inputs:
        how = "does not weigh them by how likely they are under the policy before the update"
    warnings.warn(
        f"rollout.max_staleness={rollout.max_staleness}: responses may be so many versions old, and "
        f"interfaces.{rpc.model} ({type(interface).__name__}) {how}. Correct for it: "
        f"interfaces.{rpc.model}.correction=importance_correction (docs/guides/async.md)",
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
    """Reject a `save_best` metric that the run cannot report, as far as this is known before the first step."""
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

"""Checks before loading, at launch and in `realign check`: roles, files and the output folder.

`parts` compares settings with each other. This module compares them with the files on disk, and roles with their
models, as far as the config describes them. Checks that need the tokenizer (row lengths) or the weights (support for
packed sequences) follow during loading, before the first rollout.
"""

from __future__ import annotations

import difflib
import tempfile
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path

from realign.api import RPC, ModelInterface, Weights
from realign.api.interface import implements
from realign.api.router_experts import ROUTER_EXPERTS
from realign.api.sample import TOKENS
from realign.api.sampler import ConfiguresSampler, samples_externally
from realign.api.sampling_mask import SAMPLING_MASK
from realign.engines.shared_model import Share, SharedModel
from realign.engines.training.optimizer import ScheduleUnit
from realign.errors import ConfigError
from realign.ranks import current
from realign.runtime.checks.meshes import check_meshes
from realign.runtime.checks.parts import check_parts, locating
from realign.runtime.evaluation.base import Evaluator, in_set
from realign.runtime.evaluation.calibration import RewardCalibration
from realign.runtime.experiment import Experiment
from realign.runtime.models import check_optimizers, check_outputs
from realign.runtime.processes.placement import check_runtime
from realign.runtime.rollout.spec import Async

_OF_REWARDS = ("reward", "reward_ema", "missing_rewards")


def check_ready(experiment: Experiment) -> None:
    """Find configuration errors that would otherwise stop the run later.

    Raises:
        RealignError: the message contains the key, its value and the valid values.
        OSError: `output_dir` is not writable.
    """
    check_parts(experiment)
    check_runtime(experiment)
    check_optimizers(experiment)
    check_roles(experiment)
    _check_responses(experiment)
    check_rollout(experiment)
    check_replay(experiment)
    check_images(experiment)
    _check_budget(experiment)
    _check_metrics(experiment)
    experiment.resume_folder()
    writable(experiment.output_dir)
    for role in experiment.roles:
        if role in experiment.models:
            experiment.models[role].check(role)
    check_meshes(experiment)
    experiment.data.check("data")
    calibration = {} if experiment.calibration is None else {"calibration": experiment.calibration}
    check_held_out({**experiment.all_evaluations, **calibration})


def check_held_out(owners: Mapping[str, Evaluator | RewardCalibration]) -> None:
    """Check the data nodes of evaluations and of the calibration, by config key, before anything is loaded.

    Raises:
        RealignError: the rows are streamed, or a file is missing or unusable.
    """
    for where, owner in owners.items():
        if owner.data.streams:
            raise ConfigError(f"{where}.data.streaming=true: all rows are read, in order. Set streaming=false.")
        owner.data.check(f"{where}.data")


def used_interfaces(experiment: Experiment) -> dict[str, ModelInterface]:
    """Return the interfaces that the run uses, by config key: those of the graph, and those of the evaluations."""
    used = {f"interfaces.{rpc.model}": experiment.interfaces[rpc.model] for rpc in experiment.graph.rpcs}
    for where, evaluation in experiment.all_evaluations.items():
        used |= {f"{where}.{key}": judge for key, judge in evaluation.judges.items()}
    return used


def open_interfaces(experiment: Experiment) -> None:
    """Open the interfaces, which acquire resources such as a reward function.

    With several ranks, only rank 0 opens interfaces without a model, because only rank 0 calls them.

    Raises:
        RealignError: an interface cannot be opened. The message contains the config key.
    """
    ranks = current()
    for where, interface in used_interfaces(experiment).items():
        with locating(where):
            if interface.needs_engine:
                interface.open()
            else:
                ranks.lead(interface.open)
    _check_whole_batches(experiment)


def try_interfaces(experiment: Experiment) -> None:
    """Open the interfaces, and close them again. They then describe what they found in the launch table.

    Raises:
        RealignError: an interface cannot be opened. The message contains the config key.
    """
    try:
        open_interfaces(experiment)
    finally:
        for interface in used_interfaces(experiment).values():
            interface.close()


def writable(output_dir: Path) -> Path:
    """Return the nearest existing folder of `output_dir`.

    Raises:
        OSError: files cannot be created there; the message contains `output_dir`.
    """
    folder = next(path for path in (output_dir.absolute(), *output_dir.absolute().parents) if path.exists())
    choose = "Choose another output_dir."
    if not folder.is_dir():
        raise NotADirectoryError(f"output_dir={str(output_dir)!r}: {str(folder)!r} is not a folder. {choose}")
    try:
        with tempfile.TemporaryFile(dir=folder):  # a unique name, since several runs may check at once
            pass
    except OSError as error:
        why = f"output_dir={str(output_dir)!r}: cannot write to {str(folder)!r} ({error.strerror}). {choose}"
        # `from error` decides the exit code: the new error has no errno, so `is_transient` looks at its cause
        raise type(error)(why) from error
    return folder


def _check_budget(experiment: Experiment) -> None:
    limit, response = experiment.microbatch.max_tokens_per_microbatch, experiment.longest_response
    setting = experiment.length_setting
    # `<=`: a prompt has at least one token
    if limit is not None and (limit < response if experiment.response_counts_prompt else limit <= response):
        raise ConfigError(
            f"microbatch.max_tokens_per_microbatch={limit}: this budget is too small for a prompt and its response of "
            f"up to {response} tokens ({setting}). Set it above {response}, or lower {setting}."
        )


def _check_metrics(experiment: Experiment) -> None:
    """Check `save_best` and the metrics that callbacks read."""
    if experiment.save_best is not None:
        _check_metric(
            experiment, f"save_best={experiment.save_best}", experiment.save_best.removeprefix("-"), "-loss (lowest)"
        )
    for name, callback in experiment.callbacks.items():
        for metric in callback.reads():
            if metric.startswith("eval/") and not experiment.all_evaluations:
                raise ConfigError(
                    f"callbacks.{name}: the run has no evaluation that measures {metric}. Configure an evaluation, or "
                    "choose another metric."
                )
            _check_metric(experiment, f"callbacks.{name}", metric, "loss")


def _check_metric(experiment: Experiment, where: str, metric: str, instead: str) -> None:
    """Reject a metric that the run cannot report, as far as this is known before the first step."""
    if metric in _OF_REWARDS and "rewards" not in experiment.graph.producers:
        raise ConfigError(
            f"{where}: no RPC of the graph writes rewards, so the run has no such metric. Choose another metric, such "
            f"as {instead}."
        )
    known: set[str] = set()
    for key, evaluation in experiment.all_evaluations.items():
        names = evaluation.metric_names(experiment.graph)
        # an evaluation of a user may report anything
        if names is None:
            return
        known |= {*in_set(key.partition(".")[2], names).values()}
    if known and metric.startswith("eval/") and metric not in known:
        near = difflib.get_close_matches(metric, sorted(known), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{where}: the evaluation does not measure {metric!r}{hint} (valid: {', '.join(sorted(known))})"
        )


def check_roles(experiment: Experiment) -> None:
    """Check the head, the weights and the learning rate of each role's model.

    Raises:
        ConfigError: the message contains the role and the setting.
    """
    for rpc in experiment.graph.rpcs:
        _check_model(rpc, experiment)
        _check_sharing(rpc, experiment)
        _check_schedule(rpc, experiment)


def _check_model(rpc: RPC, experiment: Experiment) -> None:
    """Check that the head in the config produces the outputs that the interface needs."""
    spec = experiment.models.get(rpc.model)
    if spec is None:
        return
    owner, key = spec, rpc.model
    if isinstance(spec, SharedModel):
        if spec.of not in experiment.roles:
            raise ConfigError(
                f"models.{rpc.model}.of={spec.of}: the graph does not use this role. Choose one of: "
                f"{', '.join(experiment.roles)}."
            )
        owner, key = experiment.models[spec.of], spec.of
        facts = owner.facts()
        if spec.branch is Share.reference and facts.trainable and facts.branches is False:
            raise ConfigError(
                f"models.{rpc.model}.branch=reference: models.{key} trains all of its weights, so it keeps no frozen "
                f"branch. Set models.{key}.trains=top_layers or lora, or models.{rpc.model}.path. An adapter that "
                f"models.{key}.path contains must be merged (adapter=merge)."
            )
    outputs = spec.facts().outputs or owner.facts().outputs
    if outputs is not None:
        check_outputs(rpc.model, outputs, experiment.interfaces[rpc.model], key)


def _check_sharing(rpc: RPC, experiment: Experiment) -> None:
    """Check a role's weights against the requirements of its interface and of the roles that train on its outputs."""
    trained = experiment.trained_roles
    spec, plan = experiment.models.get(rpc.model), experiment.interfaces[rpc.model].plan()
    if isinstance(spec, SharedModel):
        if plan.weights is Weights.frozen and spec.branch is Share.whole and spec.of in trained:
            raise ConfigError(
                f"models.{rpc.model}.branch=whole: {rpc.model} needs frozen weights, but would change with "
                f"models.{spec.of}, which is trained. Set models.{rpc.model}.branch=reference, or "
                f"models.{rpc.model}.path."
            )
        return
    path = None if spec is None else spec.facts().path
    # the rest is about a second copy of the weights that stays as it was loaded
    if path is None or rpc.model in experiment.changing_roles:
        return
    where = f"models.{rpc.model}.path={path!r}"
    share = f"Share its weights: ~models.{rpc.model} '+models.{rpc.model}={{_target_: realign.engines.SharedModel, of: "
    sampler = next((r.model for r in experiment.graph.rpcs if r.method == "generate" and r.model in trained), None)
    reader = _trained_reader(rpc, "logprobs", trained, experiment) if rpc.method == "generate" else None
    learner = reader or (sampler if plan.weights is Weights.live else None)
    if learner is not None:
        raise ConfigError(
            f"{where}: {rpc.model} must sample with the weights of models.{learner}, which is trained, but this copy "
            f"is never updated. {share}{learner}}}'. Or copy them after each step: sync.{rpc.model}.of={learner}."
        )
    learner = _trained_reader(rpc, "values", trained, experiment)
    if learner is not None and "values" in experiment.interfaces[learner].outputs():
        raise ConfigError(
            f"{where}: this model is not trained, but the loss of models.{learner} trains the values of the "
            f"value_head of models.{learner}. {share}{learner}}}'."
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
        sampler, plan = rpc.model, experiment.interfaces[rpc.model].plan()
        tokens = {key for key in rpc.outputs if key == rpc.rename.get(TOKENS, TOKENS)}
        for training in experiment.graph.rpcs:
            learner = training.model
            if training.method != "train_step" or learner == sampler or not tokens & set(training.inputs):
                continue
            expected = experiment.interfaces[learner].plan()
            n, want = plan.responses_per_prompt, expected.responses_per_prompt
            if n is not None and want is not None and n != want:
                raise ConfigError(
                    f"interfaces.{sampler}.generation.n={n}: it differs from interfaces.{learner}.generation.n={want}. "
                    f"Set both to one number, such as by interfaces.{sampler}.generation="
                    f"${{interfaces.{learner}.generation}}."
                )
            limit = expected.expected_response
            if limit is not None and limit < plan.longest_response:
                key = f"interfaces.{learner}.{expected.length_setting}"
                raise ConfigError(
                    f"interfaces.{learner}: its settings are relative to responses of {limit} tokens ({key}), but "
                    f"{sampler} generates up to {plan.longest_response} (interfaces.{sampler}.{plan.length_setting}). "
                    f"Set {key}={plan.longest_response}."
                )


def _check_schedule(rpc: RPC, experiment: Experiment) -> None:
    """Warn about a learning rate that reaches 0 before the run ends; later steps would not change the weights."""
    spec = experiment.models.get(rpc.model)
    facts = None if spec is None else spec.facts()
    if rpc.method != "train_step" or facts is None or facts.rate_ends is None:
        return
    plan = experiment.interfaces[rpc.model].plan()
    # an actor that waits for its critic takes its first step later
    steps = experiment.steps - (plan.first_training_step - 1)
    if facts.rate_unit == ScheduleUnit.optimizer_step:
        steps *= plan.optimizer_steps
    if facts.rate_ends < steps:
        warnings.warn(
            f"models.{rpc.model}.optimizer.schedule.total={facts.rate_ends}: the run has up to {steps} "
            f"{facts.rate_unit}s, and the learning rate is 0 after the first {facts.rate_ends}. Training continues "
            f"without changing the weights. Set total={steps}, or min_ratio above 0.",
            stacklevel=2,
        )


def _check_whole_batches(experiment: Experiment) -> None:
    """Check that roles that need whole batches get them. Call it after the interfaces are open.

    Raises:
        ConfigError: asynchronous rollout scores prompts one by one.
    """
    rollout = experiment.rollout
    if not isinstance(rollout, Async) or rollout.max_staleness == 0:
        return
    for rpc in experiment.graph.leading_to("rewards"):
        if experiment.interfaces[rpc.model].plan().whole_batch:
            raise ConfigError(
                f"interfaces.{rpc.model}: a reward function takes the whole batch, but rollout=async scores each "
                "prompt as soon as its responses are finished. Set rollout=sync, or let the function take one group "
                "(prompt, responses, row)."
            )


def check_rollout(experiment: Experiment) -> None:
    """Check that the RPCs of an asynchronous rollout can run ahead of training.

    Warns about objectives that do not correct for staleness.

    Raises:
        ConfigError: the message contains the RPC.
    """
    rollout = experiment.rollout
    if not isinstance(rollout, Async):
        return
    leading = experiment.graph.leading_to("rewards")
    samplers = {experiment.owner_of(rpc.model) for rpc in leading if rpc.method == "generate"}
    if not samplers:
        raise ConfigError(
            "rollout=async: none of the RPCs that lead to the key 'rewards' generates responses. Set rollout=sync."
        )
    trained = experiment.sampled_roles
    for rpc in leading:
        spec = experiment.models.get(rpc.model)
        # background samplers copy only what generates: another part of a trained network would be read while it trains
        frozen_start = isinstance(spec, SharedModel) and spec.branch is Share.reference
        owner = experiment.owner_of(rpc.model)
        if rpc.method == "train_step" or frozen_start or (owner in trained and owner not in samplers):
            what = (
                "trains a model" if rpc.method == "train_step" else f"uses models.{rpc.model}, which changes meanwhile"
            )
            raise ConfigError(
                f"rollout=async: it runs the RPCs that lead to 'rewards' ahead of training, but RPC {rpc.name!r} "
                f"{what}. Set rollout=sync."
            )
    for rpc in experiment.graph.rpcs if rollout.max_staleness else ():
        if rpc.method != "train_step" or rpc.model not in trained or "logprobs" not in rpc.inputs:
            continue
        interface = experiment.interfaces[rpc.model]
        if interface.plan().corrects_staleness:
            continue
        how = "clips the ratio to the policy that sampled them instead of the policy before the update"
        if "prox_logprobs" in rpc.inputs:
            how = "does not weight them by the importance ratio of the policy before the update"
        warnings.warn(
            f"rollout.max_staleness={rollout.max_staleness}: responses can be {rollout.max_staleness} versions old, "
            f"but interfaces.{rpc.model} ({type(interface).__name__}) {how}. Training continues without this "
            f"correction. Set interfaces.{rpc.model}.correction=importance_correction (docs/guides/async.md).",
            stacklevel=2,
        )


def check_images(experiment: Experiment) -> None:
    """Check the settings of a run whose rows have images, before models are loaded.

    Raises:
        ConfigError: a part of the run does not support images. The message contains its key.
    """
    for where, evaluation in experiment.all_evaluations.items():
        if evaluation.data.has_images and not evaluation.reads_images:
            raise no_images(where, f"{type(evaluation).__name__} does not support images")
    if experiment.calibration is not None and experiment.calibration.data.has_images:
        raise no_images("calibration", "calibration does not support images")
    if not (roles := roles_with_images(experiment)):
        return
    if experiment.runtime.starts_workers:
        raise no_images("runtime=ray", "workers do not support images")
    if current().size > 1:
        raise no_images("data.images_column", "distributed training does not support images")
    for role in roles:
        interface = experiment.interfaces.get(role)
        if experiment.data.has_images and interface is not None and not interface.reads_images:
            raise no_images(f"interfaces.{role}", f"{type(interface).__name__} does not support images")
        if samples_externally(experiment.models.get(role)):
            raise no_images(f"models.{role}.sampler", "external samplers do not support images")


def roles_with_images(experiment: Experiment) -> list[str]:
    """Return the roles with a model that see images."""
    roles = [e.role for e in experiment.all_evaluations.values() if e.data.has_images]
    if experiment.data.has_images:
        roles += [rpc.model for rpc in experiment.graph.rpcs if experiment.interfaces[rpc.model].needs_engine]
    return list(dict.fromkeys(roles))


def no_images(where: str, why: str) -> ConfigError:
    """Return the error for a part of a run that does not support images."""
    return ConfigError(f"{where}: {why}. Remove images_column from the data, or change this setting.")


def check_replay(experiment: Experiment) -> None:
    """Check interfaces and samplers, before models are loaded.

    Raises:
        ConfigError: an interface does not record the choices or sampling masks, or an external sampler does not
            return them.
    """
    for role in dict.fromkeys(rpc.model for rpc in experiment.graph.rpcs):
        interface = experiment.interfaces[role]
        generation = interface.plan().generation
        if generation is None or not (generation.router_replay or generation.sampling_replay):
            continue
        where, kind = f"interfaces.{role}.generation", type(interface).__name__
        writes = (interface.keys("generate").writes if implements(type(interface), "generate") else None) or ()
        if generation.router_replay and ROUTER_EXPERTS not in writes:
            raise ConfigError(
                f"{where}.router_replay=true: {kind} does not record choices of experts. Set "
                f"{where}.router_replay=false."
            )
        if generation.sampling_replay and SAMPLING_MASK not in writes:
            raise ConfigError(
                f"{where}.sampling_replay=true: {kind} does not record sampling masks. Set "
                f"{where}.sampling_replay=false."
            )
        owner = experiment.owner_of(role)
        spec = experiment.models.get(owner)
        if not isinstance(spec, ConfiguresSampler):
            continue
        sampler, returns = type(spec.sampler).__name__, spec.sampler.capabilities()
        if generation.router_replay and not returns.router_experts:
            raise ConfigError(
                f"{where}.router_replay=true: models.{owner}.sampler={sampler} does not return the choices of experts. "
                f"Remove models.{owner}.sampler, or set {where}.router_replay=false."
            )
        if generation.sampling_replay and not returns.sampling_replay:
            setting = generation.distortions()[0]
            raise ConfigError(
                f"{where}.{setting}: training normalizes over the tokens that it keeps, but models.{owner}.sampler="
                f"{sampler} does not return them. Remove models.{owner}.sampler, or {setting}."
            )
